"""How much memory a rank may use: of its GPU, or of the machine and of the limits set on this process."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def available_memory(device: torch.device, local_ranks: int) -> int:
    """Bytes for one rank, in use or not: of its GPU; of a CPU, the smaller of RAM and cgroup limit, divided by the
    ranks of the node."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()]) // local_ranks


def cgroup_limits(root: Path = Path("/")) -> Iterator[int]:
    """The memory limits of this process' control groups and of those above them, of version 1 and 2, in bytes.

    root: where the file systems proc and sys are mounted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = ["sys/fs/cgroup/memory"], "memory.limit_in_bytes"
        else:
            continue
        for mount in mounts:
            folders = [mount]
            for part in Path(path).parts[1:]:
                folders.append(f"{folders[-1]}/{part}")
            for folder in folders:
                # in a container, the path may be one that only the host has
                try:
                    text = (root / folder / name).read_text().strip()
                except OSError:
                    continue
                if text != "max":
                    yield int(text)


def process_bytes() -> int:
    """What this process takes of RAM now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
