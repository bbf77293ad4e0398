"""Stop a run: the first signal stops it after the step (before the first step, at once), a second signal at once."""

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NoReturn

from depthlm.distributed.interrupts import INTERRUPTED, end_process, on_signals, say

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOPPED = 75

# reports to the other ranks why this rank ends
Report = Callable[[BaseException], None]


class StopRequest:
    """The name of the signal that this rank has received, if any. Called in the thread that receives the signals.

    training: set by the training loop. Before that, the process can end at once without losing anything.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.name: str | None = None
        self.training = False

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
    """Handle signals as requests to stop the run while the block runs; in the main thread only."""
    request = StopRequest(report)
    with _handle_in_main_thread(request):
        yield request


@contextmanager
def end_on_signal(report: Report) -> Iterator[None]:
    """End the process at once on a signal while the block runs, since nothing is lost. The exit code is 130 for Ctrl-C,
    and 75 for the other signals: a scheduler sends those and should start the run again."""

    def end(number: int) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":
            _leave_terminal()
        code = INTERRUPTED if name == "SIGINT" else STOPPED
        _end(report, code, f"{name}: interrupted before training; nothing is lost, and the same command starts again")

    with _handle_in_main_thread(end):
        yield


def _handle_in_main_thread(react: Callable[[int], None]) -> AbstractContextManager[None]:
    """Return a context that calls `react` for signals. In another thread than the main one, Python's handlers stay."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return on_signals(_list_watched(), react) if in_main_thread else nullcontext()


def _end(report: Report, code: int, line: str) -> NoReturn:
    say(line)
    report(SystemExit(code))
    end_process(code)


def _list_watched() -> tuple[int, ...]:
    # under nohup, closing the terminal must not end the run
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return WATCHED if nohup else (*WATCHED, signal.SIGHUP)


def _leave_terminal() -> None:
    """Redirect output to /dev/null if its terminal is gone: writing would raise an error before the run is saved."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
