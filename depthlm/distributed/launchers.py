"""Who started this process, and its place among those of the run: plain python, torchrun, deepspeed or srun."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from depthlm.errors import UserError

# ports from here on, so many: above those of services
FIRST_PORT, PORTS = 20000, 40000
GIVE = "start it by torchrun, deepspeed or srun, which set all of them, or alone by python with none of them"


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run. address, port: where the ranks of several meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str
    nodes: int = 1
    address: str | None = None
    port: int | None = None


ALONE = Ranks(0, 0, 1, 1, "python")
_told: tuple[dict[str, str], Ranks] = {}, ALONE


def ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """The rank of this process as its launcher told it; alone if nobody did.

    Raises UserError where the variables are incomplete or contradict each other.
    """
    if environment is None:
        written, told = _told
        return told if written and written.items() <= os.environ.items() else ranks(os.environ)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _by_variables(environment)
    # A shell inside an allocation has SLURM_PROCID too; only a step that srun started has its own step id.
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID", "").isdigit():
        return _by_srun(environment)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(name, "1") != "1":
            raise UserError(f"{name}={environment[name]}, but no RANK: mpirun sets none; {GIVE}")
    return ALONE


def first_rank() -> bool:
    """Whether this process speaks for all: its rank is 0, or its environment is too broken to tell."""
    try:
        return ranks().rank == 0
    except UserError:
        return True


def device_index(ranks: Ranks, visible: int) -> int:
    """Which of the visible GPUs is this rank's; a launcher may show a process its own alone.

    Raises UserError where several ranks would share one.
    """
    if visible == 1:
        return 0
    if visible < ranks.local_world_size:
        raise UserError(
            f"{ranks.local_world_size} ranks on this node, but {visible} GPUs are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): start at most {visible} "
            "a node, or show each process one GPU"
        )
    return ranks.local_rank


def tell_deepspeed(ranks: Ranks, index: int) -> None:
    """Set the variables that DeepSpeed reads, whoever started the process; index: that of this rank's device.

    `ranks()` goes on to give what the launcher told.
    """
    global _told
    # it makes the device of number LOCAL_RANK the current one, so the rank on the node would be wrong
    numbers = {"RANK": ranks.rank, "WORLD_SIZE": ranks.world_size, "LOCAL_RANK": index}
    written = {name: str(value) for name, value in numbers.items()}
    if ranks.address is not None and ranks.port is not None:
        written |= {"MASTER_ADDR": ranks.address, "MASTER_PORT": str(ranks.port)}
    os.environ.update(written)
    _told = written, ranks


def found(ranks: Ranks, device: str) -> str:
    """What was found, as a line."""
    if ranks.world_size == 1:
        return f"started by {ranks.launcher}: one rank, on {device}"
    nodes = "one node" if ranks.nodes == 1 else f"{ranks.nodes} nodes"
    return (
        f"started by {ranks.launcher}: {ranks.world_size} ranks on {nodes}, the first on {device}; "
        f"they meet at {ranks.address}:{ranks.port}"
    )


def first_host(nodelist: str) -> str:
    """The first of SLURM's list of hosts: `gpu-003` of `gpu-[003-010],n7`. Raises UserError for no such list."""
    parts = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodelist.strip())
    if parts is None:
        raise UserError(f"SLURM's list of nodes is {nodelist!r}, which names no host: export MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", parts.group())


def _by_variables(environment: Mapping[str, str]) -> Ranks:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
    if missing:
        (present,) = {"RANK", "WORLD_SIZE"} - set(missing)
        raise UserError(f"{present}={environment[present]}, but {missing[0]} is not set: {GIVE}")
    rank, world_size = _whole(environment, "RANK"), _whole(environment, "WORLD_SIZE", least=1)
    # deepspeed has another name for the ranks of a node, and who sets the variables by hand may leave both out
    local_name = "LOCAL_RANK" if "LOCAL_RANK" in environment else "SLURM_LOCALID"
    size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "LOCAL_SIZE"
    local_rank = _whole(environment, local_name, 0)
    local_world_size = _whole(environment, size_name, local_rank + 1, least=1)
    for name, value, size_of, size in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        (local_name, local_rank, size_name, local_world_size),
    ):
        if value >= size:
            raise UserError(f"{name}={value}, but {size_of}={size}: ranks count from 0 to {size - 1}")
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher, nodes = "torchrun", _whole(environment, "GROUP_WORLD_SIZE", 1, least=1)
    elif "CROSS_SIZE" in environment:
        launcher, nodes = "deepspeed", _whole(environment, "CROSS_SIZE", least=1)
    else:
        by_hand = "python" if world_size == 1 else "variables set by hand"
        launcher, nodes = by_hand, max(1, world_size // local_world_size)
    if world_size == 1:
        return Ranks(rank, local_rank, world_size, local_world_size, launcher, nodes)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise UserError(
            f"{world_size} ranks, but {' and '.join(missing)} not set: export the first node's name "
            "and a free port, as torchrun does"
        )
    address, port = environment["MASTER_ADDR"], _port(environment)
    return Ranks(rank, local_rank, world_size, local_world_size, launcher, nodes, address, port)


def _by_srun(environment: Mapping[str, str]) -> Ranks:
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    rank, tasks = _whole(environment, "SLURM_PROCID"), _whole(environment, tasks_name, 1, least=1)
    if rank >= tasks:
        raise UserError(f"SLURM_PROCID={rank}, but {tasks_name}={tasks}: start each task by srun itself")
    if tasks == 1:
        return Ranks(0, 0, 1, 1, "srun")
    local_rank = _whole(environment, "SLURM_LOCALID", 0)
    per_node = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(local_rank + 1)))
    node = _whole(environment, "SLURM_NODEID", 0)
    here = per_node[node] if node < len(per_node) and local_rank < per_node[node] else max(*per_node, local_rank + 1)
    address = environment.get("MASTER_ADDR") or first_host(
        environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    )
    if environment.get("MASTER_PORT"):
        port = _port(environment)
    else:
        # consecutive jobs, and the steps of one, may share a node
        job, step = _whole(environment, "SLURM_JOB_ID", 0), _whole(environment, "SLURM_STEP_ID")
        port = FIRST_PORT + (job * 101 + step) % PORTS
    nodes = _whole(environment, "SLURM_STEP_NUM_NODES", len(per_node), least=1)
    return Ranks(rank, local_rank, tasks, here, "srun", nodes, address, port)


def _tasks_per_node(text: str) -> list[int]:
    """`4(x2),3` as [4, 4, 3]."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(parts):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text}: no list such as 4(x2),3; start each task by srun itself")
    return [int(part[1]) for part in parts if part is not None for _ in range(int(part[2] or 1))]


def _whole(environment: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise UserError(f"{name} is not set: {GIVE}")
        return default
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < least:
        raise UserError(f"{name}={text}: not a whole number of at least {least}; {GIVE}")
    return int(text)


def _port(environment: Mapping[str, str]) -> int:
    port = _whole(environment, "MASTER_PORT", least=1)
    if port > 65535:
        raise UserError(f"MASTER_PORT={port}: ports count from 1 to 65535")
    return port
