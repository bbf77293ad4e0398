"""What all ranks must decide alike; every function here is collective."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from depthlm.distributed.process_group import wait_for_first_rank
from depthlm.errors import UserError

T = TypeVar("T")


class Rank0Error(RuntimeError):
    """What the first rank could not do, as the others raise it."""


def on_any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Of each flag, whether any rank has it up."""
    if torch.distributed.get_world_size() == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.int32, device=device)
    torch.distributed.all_reduce(raised, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def smallest(value: int, device: torch.device) -> int:
    """The smallest value of all ranks."""
    if torch.distributed.get_world_size() == 1:
        return value
    values = torch.tensor(value, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MIN)
    return int(values)


def on_rank_0(action: Callable[[], T]) -> T:
    """What the action gives on the first rank, where alone it is done.

    Where it raises, all ranks do: UserError and OSError as such, with the same words, anything else as
    Rank0Error.
    """
    outcome: list[tuple[T | None, type[Exception] | None, str]] = [(None, None, "")]
    failure: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [(action(), None, "")]
        except Exception as error:
            failure = error
            alike = next((kind for kind in (UserError, OSError) if isinstance(error, kind)), Rank0Error)
            outcome = [(None, alike, str(error))]
    wait_for_first_rank()
    torch.distributed.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    value, kind, text = outcome[0]
    if kind is not None:
        raise kind(text)
    return value  # type: ignore[return-value]
