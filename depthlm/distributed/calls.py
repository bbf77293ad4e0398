"""Rank 0 calls functions on all ranks from a separate thread, so that nothing this thread waits for blocks a rank."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from depthlm.distributed.process_group import gather, on_any_rank
from depthlm.distributed.watchdog import Activity

# calls a function by its name on all ranks with one argument, and returns the values by rank
Call = Callable[[str, Any], list[Any]]
# sends a value to all ranks
Send = Callable[[Any], None]

# seconds between two messages of rank 0 while rank 0's thread computes or waits for something
POLL = 0.5
IDLE, CALL, SEND, END = "idle", "call", "send", "end"
# the failure that stands for a StoppedError of a function
STOPPED = "stopped"


class CallError(RuntimeError):
    """A called function has failed on a rank."""


class StoppedError(Exception):
    """Raised by a called function on a rank that has to stop."""


class AbandonedThread(BaseException):
    """Raised in rank 0's thread, at its next call, after the ranks have stopped serving it."""


def serve(
    work: Callable[[Call, Send], None],
    functions: Mapping[str, Callable[[Any], Any]],
    receive: Callable[[Any], None],
    activity: Activity,
    stopping: Callable[[], bool],
    patience: float,
    device: torch.device,
) -> str | None:
    """Run `work` in a thread of rank 0 while all ranks execute its calls. Collective.

    functions: what may be called. A failure of one on any rank is raised in `work` as CallError, but StoppedError ends
    the work. receive: gets, on every rank, what `work` sends. stopping: whether this rank has to stop. patience: the
    seconds without a call after which `work` is abandoned.

    Returns why `work` did not finish, the same on all ranks, or None: its exception, an empty text if a rank had to
    stop, or a description of a thread that was abandoned.
    """
    leader = _Leader(work, patience) if torch.distributed.get_rank() == 0 else None
    try:
        while True:
            activity.mark_progress()
            if on_any_rank((stopping(),), device)[0]:
                return ""
            message: list[Any] = [leader.next_message() if leader is not None else None]
            torch.distributed.broadcast_object_list(message)
            kind, value = message[0]
            if kind == END:
                return value
            if kind == SEND:
                receive(value)
            if kind == CALL:
                name, argument = value
                outcomes = gather(_attempt(functions[name], argument))
                if any(failure == STOPPED for _, failure in outcomes):
                    return ""
                if leader is not None:
                    leader.reply(outcomes)
    finally:
        if leader is not None:
            leader.abandon()


def _attempt(function: Callable[[Any], Any], argument: Any) -> tuple[Any, str | None]:
    """Return the value of a function, and why it failed, if it did."""
    try:
        return function(argument), None
    except StoppedError:
        return None, STOPPED
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


class _Leader:
    """The thread of rank 0, and the two queues between it and the main thread."""

    def __init__(self, work: Callable[[Call, Send], None], patience: float) -> None:
        self.work, self.patience = work, patience
        self.messages: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.replies: queue.Queue[list[tuple[Any, str | None]] | None] = queue.Queue()
        self.last_message = time.monotonic()
        self.abandoned = False
        threading.Thread(target=self._run, name="calls", daemon=True).start()

    def next_message(self) -> tuple[str, Any]:
        """Return the next message of the thread; IDLE if there is none yet, END if it has been silent for too long."""
        try:
            message = self.messages.get(timeout=POLL)
        except queue.Empty:
            silent = time.monotonic() - self.last_message > self.patience
            return (END, f"no progress for {self.patience / 60:.0f} min") if silent else (IDLE, None)
        self.last_message = time.monotonic()
        return message

    def reply(self, outcomes: list[tuple[Any, str | None]]) -> None:
        """Pass the outcomes of a call to the thread, whose silence is counted from now on."""
        self.last_message = time.monotonic()
        self.replies.put(outcomes)

    def abandon(self) -> None:
        """End the thread at its next call, or at the one it waits for."""
        self.abandoned = True
        self.replies.put(None)

    def _run(self) -> None:
        try:
            self.work(self._call, lambda value: self.messages.put((SEND, value)))
        except AbandonedThread:
            return
        except BaseException as error:
            self.messages.put((END, str(error) or type(error).__name__))
        else:
            self.messages.put((END, None))

    def _call(self, name: str, argument: Any) -> list[Any]:
        if self.abandoned:
            raise AbandonedThread
        self.messages.put((CALL, (name, argument)))
        outcomes = self.replies.get()
        if outcomes is None:
            raise AbandonedThread
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise CallError(failure if len(outcomes) == 1 else f"rank {rank}: {failure}")
        return [value for value, _ in outcomes]
