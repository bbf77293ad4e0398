"""A first signal asks the loop to stop after the step; a second one stops at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


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
    before = {number: signal.signal(number, request) for number in WATCHED}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
