"""The checks of `doctor` on device, driver, memory, disk and ranks."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from depthlm.counts import gib_text
from depthlm.distributed import launchers
from depthlm.doctor.item import PROBLEM, WARNING, Item
from depthlm.errors import UserError
from depthlm.machine import environment
from depthlm.machine.gpu import probe
from depthlm.machine.memory import cgroup_limits

# with less than this, even a small run may fail
LOW_MEMORY, LOW_SHARED_MEMORY, LOW_DISK = 2 * 2**30, 256 * 2**20, 5 * 2**30


def device(choice: str) -> Item:
    """Check the device that trains."""
    import torch

    if error := environment.device_error(choice):
        reason, _, remedy = error.partition("; ")
        return Item("device", reason, PROBLEM, remedy)
    if environment.device_type(choice) == "cpu":
        return Item("device", f"CPU: {environment.device_name('cpu')}")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{gpu.name}, {gib_text(gpu.total_memory, 1)}, compute capability {gpu.major}.{gpu.minor}" for gpu in gpus]
    return Item("device", "; ".join(f"cuda:{index}: {name}" for index, name in enumerate(names)))


def driver() -> Item:
    """Report NVIDIA's driver and the CUDA version that torch is built for."""
    gpu = probe()
    built = f"torch {gpu.torch} is built for {f'CUDA {gpu.torch_cuda}' if gpu.torch_cuda else 'the CPU'}"
    if gpu.driver is None and gpu.driver_cuda is None:
        return Item("driver", f"no NVIDIA driver; {built}")
    supports = (
        "" if gpu.driver_cuda is None else f", which supports CUDA up to {gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}"
    )
    return Item("driver", f"NVIDIA {gpu.driver or 'of unknown version'}{supports}; {built}")


def communication(device_type: str) -> Item:
    """Check the backend through which ranks communicate."""
    import torch

    if device_type == "cpu":
        return Item("NCCL", "not used: ranks on a CPU communicate by gloo")
    if not torch.distributed.is_nccl_available():
        return Item("NCCL", "not included in this torch", PROBLEM, "install a torch build with CUDA (pytorch.org)")
    return Item("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def memory() -> Item:
    """Check RAM and the limit that a container or scheduler sets."""
    total, available, limit = memory_limits()
    shown = "no limit for this process" if limit is None else f"this process may use {gib_text(limit, 1)}"
    value = f"{gib_text(available, 1)} of {gib_text(total, 1)} are free; {shown}"
    if min(available, total if limit is None else limit) < LOW_MEMORY:
        return Item("memory", value, WARNING, "free some memory, or ask the scheduler or container for more")
    return Item("memory", value)


def memory_limits() -> tuple[int, int, int | None]:
    """Return the machine's RAM, its free RAM, and the smallest limit of this process's control groups, in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0]: 1024 * int(words[1]) for words in lines}
    total = sizes["MemTotal:"]
    limit = min(cgroup_limits(), default=total)
    return total, sizes["MemAvailable:"], limit if limit < total else None


def shared_memory() -> Item:
    """Check /dev/shm, through which data workers and NCCL pass tensors."""
    if not Path("/dev/shm").is_dir():
        return Item("shared memory", "no /dev/shm", WARNING, "data.num_workers=0 works without it")
    free = shutil.disk_usage("/dev/shm").free
    if free < LOW_SHARED_MEMORY:
        remedy = "data workers and NCCL may fail; start a container with --shm-size=1g"
        return Item("shared memory", f"{gib_text(free, 1)} free in /dev/shm", WARNING, remedy)
    return Item("shared memory", f"{gib_text(free, 1)} free in /dev/shm")


def disk(name: str, folder: Path) -> Item:
    """Check that a run can write to a folder, and that its disk has free space."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Item(name, f"{existing} cannot be written to", PROBLEM, "give output_dir= (data.path= for token files)")
    free = shutil.disk_usage(existing).free
    if free < LOW_DISK:
        remedy = "a checkpoint takes 12 bytes per parameter, and two are kept; free some space, or give another folder"
        return Item(name, f"{gib_text(free, 1)} free in {existing}", WARNING, remedy)
    return Item(name, f"{gib_text(free, 1)} free in {existing}")


def ranks() -> Iterator[Item]:
    """Report the launcher of this process, and the CPU cores and threads of each rank."""
    try:
        process_ranks = launchers.ranks()
    except UserError as error:
        yield Item("ranks", "the launcher's variables contradict each other", PROBLEM, str(error))
        return
    yield Item("ranks", launchers.describe_launch(process_ranks, "this machine"))
    cores, threads = environment.cores(), environment.threads(process_ranks)
    yield Item("cores", f"{cores} of {os.cpu_count()} for this process, {threads} threads per rank")
