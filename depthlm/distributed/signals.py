"""A first signal asks the run to stop after the step, or ends it if no step has begun; a second one ends it at once."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from depthlm.distributed.interrupts import INTERRUPTED, end_process, on_signals, say

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# by this one submitit learns that its job is to be preempted, or is out of time
PREEMPTED = signal.SIGUSR2
STOPPED = 75

# tells the other ranks why this one ends
Report = Callable[[BaseException], None]


class StopRequest:
    """Whether a signal has come to this rank: its name. Called in the thread that receives the signals.

    training: set by the loop. Before, nothing is lost by ending at once.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.name: str | None = None
        # submitit requeues the job where the run returns, so there it is not ended
        self.training = _requeued()

    def __call__(self, number: int) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":
            _leave_terminal()
        if not self.training:
            _end(self.report, STOPPED, f"{name}: stopped before the first step; the same command starts again")
        if self.name is None:
            self.name = name
            say(f"{name}: the run stops after this step; a second signal stops it at once")
        elif name != "SIGHUP":
            end_process(1)


@contextmanager
def stop_on_signal(report: Report) -> Iterator[StopRequest]:
    """Watch for the signals while the block runs, in which the run directory is this run's."""
    request = StopRequest(report)
    with on_signals(_watched() + ((PREEMPTED,) if _requeued() else ()), request):
        yield request


@contextmanager
def end_on_signal(report: Report) -> Iterator[None]:
    """While the block runs, a signal ends the process at once: nothing is lost. Ctrl-C is the user's, the others are a
    scheduler's, which is to start the run again."""

    def end(number: int) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":
            _leave_terminal()
        code = INTERRUPTED if name == "SIGINT" else STOPPED
        _end(report, code, f"{name}: interrupted before training; nothing is lost, and the same command starts again")

    if _requeued():
        yield
        return
    with on_signals(_watched(), end):
        yield


def hand_back() -> None:
    """Let submitit requeue the job, where it runs this process: the run has been stopped, and everything is saved."""
    if _requeued():
        signal.raise_signal(PREEMPTED)


def _end(report: Report, code: int, line: str) -> NoReturn:
    say(line)
    report(SystemExit(code))
    end_process(code)


def _watched() -> tuple[int, ...]:
    # under nohup the end of the terminal is not to end the run
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return WATCHED if nohup else (*WATCHED, signal.SIGHUP)


def _requeued() -> bool:
    return callable(signal.getsignal(PREEMPTED))


def _leave_terminal() -> None:
    """Let output go nowhere if its terminal is gone: to write there would raise an error before the run is saved."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
