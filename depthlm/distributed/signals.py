"""Signals act at once, whatever the main thread is doing. In training, the first one stops the run after the step.

Python calls signal handlers in the main thread, between two bytecodes: during one long operation (a matrix product,
the training of a tokenizer) a handler waits for minutes. But Python writes the signal's number to the file descriptor
of `signal.set_wakeup_fd` immediately, and a thread of this module reads it from there.

Ctrl-C prints a traceback until a command has called `quiet_interrupts`, so this module imports only what loads fast.
"""

import os
import signal
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from select import select
from types import FrameType
from typing import NoReturn

INTERRUPTED, STOPPED = 130, 75
WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# reports to the other ranks why this rank ends
Report = Callable[[BaseException], None]
# not a signal's number: it ends the thread
END = 0
# write ends of this process's pipes, to which a forked child must not write
_pipes: set[int] = set()
# for each thread that is forking: its signal mask before the fork
_masks: dict[int, Iterable[int]] = {}


class on_signals:
    """A context manager that calls `react` with the number of each of these signals, in a thread of its own.

    It can be nested: the innermost one receives the signals. In a forked child these signals end the child.
    Raises ValueError outside the main thread.
    """

    def __init__(self, numbers: Collection[int], react: Callable[[int], None]) -> None:
        self.numbers, self.react = frozenset(numbers), react

    def __enter__(self) -> None:
        self.process = os.getpid()
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        _pipes.add(self.writer)
        # a signal that arrives before the thread runs waits in the pipe
        self.handlers = {number: signal.signal(number, self._handle) for number in self.numbers}
        threading.Thread(target=self._read, daemon=True).start()

    def __exit__(self, *raised: object) -> None:
        for number, handler in self.handlers.items():
            # None: the previous handler was not set by Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self.wakeup)
        _pipes.discard(self.writer)
        os.write(self.writer, bytes([END]))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # the thread reads the number from the pipe; a forked child has no such thread
        if os.getpid() != self.process:
            os._exit(128 + number)

    def _read(self) -> None:
        while (number := os.read(self.reader, 1)[0]) != END:
            if number in self.numbers:
                self.react(number)
        os.close(self.reader)
        os.close(self.writer)


def quiet_interrupts(command: str, note: str = "") -> None:
    """Make Ctrl-C print one line and end this process with code 130, at once and without a traceback.

    note: added to that line. Ranks other than 0 print nothing.
    """

    def leave(_: int) -> None:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            say(f"{command}: interrupted{note and f'; {note}'}")
        end_process(INTERRUPTED)

    # never exited: the end of the process ends it
    on_signals((signal.SIGINT,), leave).__enter__()


def say(line: str) -> None:
    """Write one line to stderr without Python's buffers, whose locks the main thread may hold."""
    _write(2, f"{os.isatty(2) * chr(10)}{line}\n")


def end_process(code: int) -> NoReturn:
    """End this process without waiting for anything, and show the cursor that a progress bar has hidden."""
    for stream in (1, 2):
        if os.isatty(stream):
            _write(stream, "\x1b[?25h")
    os._exit(code)


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
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    # under nohup, closing the terminal must not end the run
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return on_signals(WATCHED if nohup else (*WATCHED, signal.SIGHUP), react)


def _end(report: Report, code: int, line: str) -> NoReturn:
    say(line)
    report(SystemExit(code))
    end_process(code)


def _leave_terminal() -> None:
    """Redirect output to /dev/null if its terminal is gone: writing would raise an error before the run is saved."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _write(stream: int, text: str) -> None:
    try:
        # writing to a stopped terminal or a full pipe would block forever
        if select([], [stream], [], 0.5)[1]:
            os.write(stream, text.encode())
    except OSError:
        return  # the terminal or the reader of the pipe is gone


def _before_fork() -> None:
    # while the child still has the pipe, a signal to it would reach the parent
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident()))


def _after_fork_in_child() -> None:
    wakeup = signal.set_wakeup_fd(-1)
    if wakeup not in _pipes:
        signal.set_wakeup_fd(wakeup)
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
