"""The process group: joining and leaving it, this rank's device, and decisions and values that all ranks share.

Every function that is marked as collective must be called by all ranks in the same order.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import DistError, HashStore, PrefixStore, Store, distributed_c10d

from depthlm.distributed.launchers import Ranks, describe_launch, device_index, set_deepspeed_variables
from depthlm.errors import UserError
from depthlm.machine import environment

log = logging.getLogger("depthlm")
ARRIVAL = timedelta(minutes=10)
OPERATION = timedelta(minutes=30)
_store: Store | None = None
_waits = 0
T = TypeVar("T")


def start_distributed(ranks: Ranks, timeout: timedelta = OPERATION, device_choice: str = "auto") -> torch.device:
    """Join the process group (once per process), choose this rank's device, and log both.

    timeout: for one collective operation; device_choice: as the key `device`.
    Raises UserError if ranks would share a GPU, or do not meet.
    """
    device = torch.device("cpu")
    if environment.device_type(device_choice) == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        device = torch.device("cuda", device_index(ranks, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    # DeepSpeed reads these variables even if the group exists, and imports mpi4py if they are missing
    set_deepspeed_variables(ranks, device.index or 0)
    for line in describe_launch(ranks, f"{device} of {socket.gethostname()}").split("; "):
        log.info("%s", line)
    if not torch.distributed.is_initialized():
        global _store
        # torchrun keeps its store when it starts the workers again; they would read addresses of the attempt before
        attempt = f"depthlm {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        # a single rank opens no port, so any number of runs can start on one machine at once
        _store = HashStore() if ranks.world_size == 1 else PrefixStore(attempt, rendezvous(ranks))
        torch.distributed.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=_store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            # without it, NCCL guesses the GPU of a rank at its first barrier
            device_id=device if device.type == "cuda" else None,
        )
    return device


def process_groups() -> set[Any]:
    """Return the process groups of which this rank is a member."""
    return {*distributed_c10d._world.pg_map}


def set_timeout(groups: Iterable[Any], timeout: timedelta) -> None:
    """Set the timeout of the collective operations of process groups."""
    for group in groups:
        distributed_c10d._set_pg_timeout(timeout, group)


def rendezvous(ranks: Ranks) -> Store:
    """Return the store at which all ranks have met. Raises UserError if they do not meet."""
    where = f"{ranks.address}:{ranks.port}"
    try:
        socket.getaddrinfo(ranks.address, ranks.port)
    except OSError as error:
        raise UserError(
            f"the ranks should meet at {where}, a name that {socket.gethostname()} cannot resolve ({error}): export "
            "MASTER_ADDR, the name or address at which the other nodes reach the node of rank 0"
        ) from None
    try:
        store, _, _ = next(torch.distributed.rendezvous("env://", ranks.rank, ranks.world_size, timeout=ARRIVAL))
    except DistError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the {ranks.world_size} ranks did not meet at {where} within {ARRIVAL.total_seconds():.0f} s ({reason}): "
            "check whether each of them has started, whether the node of rank 0 is reachable there, and whether "
            "the port is free (set another one with MASTER_PORT)"
        ) from None
    return store


def wait_for_rank_0() -> None:
    """Wait until rank 0 has reached this call, for hours if necessary; rank 0 does not wait. Collective.

    A collective operation could wait no longer than its timeout.
    """
    global _waits
    _waits += 1
    if _store is None or torch.distributed.get_world_size() == 1:
        return
    name = f"rank 0/{_waits}"
    if torch.distributed.get_rank() == 0:
        _store.set(name, "")
    pause = 0.001
    while not _store.check([name]):
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)


def leave_distributed(together: bool = True) -> None:
    """Leave the process group: gloo's threads abort a process that ends without this call.

    together: wait for the other ranks first.
    """
    if together and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


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
    wait_for_rank_0()
    torch.distributed.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    value, raised_type, message = outcome[0]
    if raised_type is not None:
        raise raised_type(message)
    return value  # type: ignore[return-value]
