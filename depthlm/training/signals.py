"""A first signal asks the loop to stop after the step; a second one stops at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# by this one submitit learns that its job is to be preempted, or is out of time
PREEMPTED = signal.SIGUSR2


class StopRequest:
    """Whether a signal has come to this rank: its name."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            # whatever would be waited for on an orderly way out
            os._exit(1)
        self.name = signal.Signals(number).name
        # the log may be what was interrupted
        os.write(2, f"\n{self.name}: the run stops after this step; a second signal stops it at once\n".encode())


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Watch for the signals for as long as the block runs."""
    request = StopRequest()
    watched = (*WATCHED, PREEMPTED) if _requeued() else WATCHED
    before = {number: signal.signal(number, request) for number in watched}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hand_back() -> None:
    """Let submitit requeue the job, where it runs this process: the run has been stopped, and everything is saved."""
    if _requeued():
        signal.raise_signal(PREEMPTED)


def _requeued() -> bool:
    return callable(signal.getsignal(PREEMPTED))
