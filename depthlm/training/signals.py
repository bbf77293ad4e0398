"""A first signal asks the loop to stop after the step; a second one stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether a signal has come, on this rank or on another."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise SystemExit(1)
        self.name = signal.Signals(number).name

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank."""
        if torch.distributed.get_world_size() == 1:
            return self.name is not None
        flag = torch.tensor([self.name is not None], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


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
