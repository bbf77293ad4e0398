"""Decisions and values shared by all ranks; every function here is collective."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from depthlm.distributed.process_group import wait_for_first_rank
from depthlm.errors import UserError

T = TypeVar("T")


class Rank0Error(RuntimeError):
    """Raised on the other ranks when an action on rank 0 has failed."""


def on_any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Return for each flag whether any rank has set it."""
    if torch.distributed.get_world_size() == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.int32, device=device)
    torch.distributed.all_reduce(raised, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def gather(value: T) -> list[T]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def smallest(value: int, device: torch.device) -> int:
    """Return the smallest value of all ranks."""
    if torch.distributed.get_world_size() == 1:
        return value
    values = torch.tensor(value, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MIN)
    return int(values)


def on_rank_0(action: Callable[[], T]) -> T:
    """Run an action on rank 0 only, and return its result on every rank.

    If it raises, all ranks raise: UserError and OSError as such, with the same message, anything else as Rank0Error on
    the other ranks.
    """
    outcome: list[tuple[T | None, type[Exception] | None, str]] = [(None, None, "")]
    failure: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [(action(), None, "")]
        except Exception as error:
            failure = error
            error_type = next((cls for cls in (UserError, OSError) if isinstance(error, cls)), Rank0Error)
            outcome = [(None, error_type, str(error))]
    wait_for_first_rank()
    torch.distributed.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    value, raised_type, message = outcome[0]
    if raised_type is not None:
        raise raised_type(message)
    return value  # type: ignore[return-value]
