"""The memory that a rank may use: that of its GPU, or of the machine within the limits of this process."""

import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch


def available_memory(device: torch.device, local_ranks: int) -> int:
    """Return the memory for one rank in bytes, used or not.

    On a GPU, all of its memory. On a CPU, the smaller of RAM and cgroup limit, divided by the ranks of the node.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()]) // local_ranks


def cgroup_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the memory limits of this process's control groups (version 1 and 2) and of their parents, in bytes.

    root: the directory in which the file systems proc and sys are mounted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = ["sys/fs/cgroup/memory"], "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (root / mount / parent for mount in mounts for parent in (group, *group.parents)):
            # in a container, the path may exist only on the host
            with suppress(OSError):
                text = (folder / name).read_text().strip()
                if text != "max":
                    yield int(text)


def process_bytes() -> int:
    """Return the RAM that this process uses, in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_process_bytes() -> int:
    """Return the most RAM that this process has used so far, in bytes."""
    try:
        # on Linux, ru_maxrss begins with the memory of the process that started this one
        match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        match = None
    if match is not None:
        return 1024 * int(match[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
