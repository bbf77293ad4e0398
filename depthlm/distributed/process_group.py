"""Joining the other ranks and parting from them: rendezvous, process group, this rank's device."""

import logging
import os
import socket
import time
from datetime import timedelta

import torch
from torch.distributed import DistError, HashStore, PrefixStore, Store

from depthlm.distributed.launchers import Ranks, device_index, found, tell_deepspeed
from depthlm.errors import UserError
from depthlm.machine import environment

log = logging.getLogger("depthlm")

ARRIVAL = timedelta(minutes=10)
OPERATION = timedelta(minutes=30)
_store: Store | None = None
_waits = 0


def start_distributed(
    ranks: Ranks, timeout: timedelta = OPERATION, arrival: timedelta = ARRIVAL, device_choice: str = "auto"
) -> torch.device:
    """Join the process group (once a process), choose this rank's device, and log what was found.

    timeout: for one collective operation; arrival: for all ranks to come; device_choice: as the key `device`.
    Raises UserError where ranks would share a GPU, or do not meet.
    """
    device = torch.device("cpu")
    if environment.device_type(device_choice) == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        device = torch.device("cuda", device_index(ranks, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    # DeepSpeed looks for these even where the group exists, and for mpi4py where they are missing
    tell_deepspeed(ranks, device.index or 0)
    log.info("%s", found(ranks, f"{device} of {socket.gethostname()}"))
    if not torch.distributed.is_initialized():
        global _store
        # a rank alone opens no port, so any number of runs can start on one machine at once
        _store = HashStore() if ranks.world_size == 1 else PrefixStore("depthlm", rendezvous(ranks, arrival))
        torch.distributed.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=_store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
    return device


def rendezvous(ranks: Ranks, arrival: timedelta) -> Store:
    """The store that all ranks have come to. Raises UserError where they do not, in words."""
    where = f"{ranks.address}:{ranks.port}"
    try:
        socket.getaddrinfo(ranks.address, ranks.port)
    except OSError as error:
        raise UserError(
            f"the ranks are to meet at {where}, a name that {socket.gethostname()} cannot resolve ({error}): export "
            "MASTER_ADDR, the name or address of the first rank's node as the others reach it"
        ) from None
    try:
        store, _, _ = next(torch.distributed.rendezvous("env://", ranks.rank, ranks.world_size, timeout=arrival))
    except DistError as error:
        told = str(error).strip().splitlines()[0]
        raise UserError(
            f"the {ranks.world_size} ranks did not meet at {where} within {arrival.total_seconds():.0f} s ({told}): "
            "look whether each of them has started, whether the first one's node is reachable there, and whether "
            "the port is free (MASTER_PORT gives another)"
        ) from None
    return store


def wait_for_first_rank() -> None:
    """Return on the others once the first rank has come here, after hours if need be; it does not wait. Collective.

    In a collective operation they could wait no longer than its timeout.
    """
    global _waits
    _waits += 1
    if _store is None or torch.distributed.get_world_size() == 1:
        return
    name = f"first rank/{_waits}"
    if torch.distributed.get_rank() == 0:
        _store.set(name, "")
    pause = 0.001
    while not _store.check([name]):
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)


def leave_distributed(together: bool = True) -> None:
    """Part from the other ranks: gloo's threads abort a process that ends without it.

    together: wait for the others first. A rank alone keeps its group for the next run of the same process.
    """
    if torch.distributed.get_world_size() > 1:
        if together:
            torch.distributed.barrier()
        torch.distributed.destroy_process_group()
