"""Signals that act at once, whatever the main thread is doing.

Python calls a signal's handler in the main thread, between two bytecodes: inside one long operation (a matrix product,
the training of a tokenizer) it waits for minutes. But at the moment of the signal it writes the signal's number to
`signal.set_wakeup_fd`, and here a thread reads it from there.

Commands import this module before all others, and until they have called `quiet_interrupts` Ctrl-C prints a traceback.
So it imports only what takes no time: of `signal` the part in C, without the enums.
"""

import _signal
import _thread
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from types import FrameType
    from typing import NoReturn

INTERRUPTED = 130
# no signal has this number: it ends the thread
END = 0
# write ends of the pipes of this process, which a forked child must not write to
_pipes: set[int] = set()
# of threads that fork: the signals that each has blocked otherwise
_masks: "dict[int, Iterable[int]]" = {}


class on_signals:
    """A block in which `react` is called with the number of each of these signals, in a thread of its own.

    Blocks may be nested: the inner one gets the signals. In a forked child these signals end the child.
    Raises ValueError outside the main thread.
    """

    def __init__(self, numbers: "Collection[int]", react: "Callable[[int], None]") -> None:
        self.numbers, self.react = frozenset(numbers), react

    def __enter__(self) -> None:
        self.process = os.getpid()
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.wakeup = _signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        _pipes.add(self.writer)
        _thread.start_new_thread(self._read, ())
        self.handlers = {number: _signal.signal(number, self._handle) for number in self.numbers}

    def __exit__(self, *raised: object) -> None:
        for number, handler in self.handlers.items():
            # None: a handler that was not set by Python
            _signal.signal(number, _signal.SIG_DFL if handler is None else handler)
        _signal.set_wakeup_fd(self.wakeup)
        _pipes.discard(self.writer)
        os.write(self.writer, bytes([END]))

    def _handle(self, number: int, frame: "FrameType | None") -> None:
        # the thread has the number already; a forked child has no such thread
        if os.getpid() != self.process:
            os._exit(128 + number)

    def _read(self) -> None:
        while (number := os.read(self.reader, 1)[0]) != END:
            if number in self.numbers:
                self.react(number)
        os.close(self.reader)
        os.close(self.writer)


def quiet_interrupts(command: str, note: str = "") -> None:
    """From here on Ctrl-C prints one line and ends this process with 130, at once and without a traceback.

    note: what the user should know then. A rank other than 0 prints nothing.
    """

    def leave(_: int) -> None:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            say(f"{command}: interrupted{note and f'; {note}'}")
        end_process(INTERRUPTED)

    # the end of the process ends the block
    on_signals((_signal.SIGINT,), leave).__enter__()


def say(line: str) -> None:
    """Write one line to stderr, past Python's buffers: the main thread may hold their locks."""
    _write(2, f"{os.isatty(2) * chr(10)}{line}\n")


def end_process(code: int) -> "NoReturn":
    """End this process without waiting for anything, and show the cursor, which a progress bar hides."""
    for stream in (1, 2):
        if os.isatty(stream):
            _write(stream, "\x1b[?25h")
    os._exit(code)


def _write(stream: int, text: str) -> None:
    from select import select

    try:
        # to write to a stopped terminal or a full pipe would take for ever
        if select([], [stream], [], 0.5)[1]:
            os.write(stream, text.encode())
    except OSError:
        return  # the terminal or the reader of the pipe is gone


def _before_fork() -> None:
    # a signal that reaches the child while it still has the pipe would be the parent's
    _masks[_thread.get_ident()] = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())


def _after_fork_in_parent() -> None:
    _signal.pthread_sigmask(_signal.SIG_SETMASK, _masks.pop(_thread.get_ident()))


def _after_fork_in_child() -> None:
    wakeup = _signal.set_wakeup_fd(-1)
    if wakeup not in _pipes:
        _signal.set_wakeup_fd(wakeup)
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
