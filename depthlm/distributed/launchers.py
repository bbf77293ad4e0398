"""The launcher of this process (python, torchrun, deepspeed or srun), and its rank in the run."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from depthlm.counts import format_count
from depthlm.errors import UserError

# the range of ports used under srun: above those of common services
FIRST_PORT, PORTS = 20000, 40000
ADVICE = (
    "start with torchrun, deepspeed or srun, which set all of these variables, or with plain python and none of them"
)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the world of the run. address, port: where several ranks meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str
    nodes: int = 1
    address: str | None = None
    port: int | None = None


# what the launcher or this process sets for a run
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
SINGLE_RANK = Ranks(0, 0, 1, 1, "python")
_launched: tuple[dict[str, str], Ranks] = {}, SINGLE_RANK


def ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return the rank of this process as its launcher has set it; a single rank without a launcher.

    Raises UserError if the variables are incomplete or contradict each other.
    """
    if environment is None:
        written, launched = _launched
        return launched if written and written.items() <= os.environ.items() else ranks(os.environ)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _read_variables(environment)
    # A shell inside an allocation has SLURM_PROCID too; only a step that srun started has its own step id.
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID", "").isdigit():
        return _read_srun(environment)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(name, "1") != "1":
            raise UserError(f"{name}={environment[name]}, but RANK is not set, since mpirun does not set it; {ADVICE}")
    return SINGLE_RANK


def is_rank_0() -> bool:
    """Return whether this process prints for all ranks: its rank is 0, or its environment is too broken to know."""
    try:
        return ranks().rank == 0
    except UserError:
        return True


def device_index(ranks: Ranks, visible: int) -> int:
    """Return the index of this rank's GPU among the visible ones; a launcher may show a process only its own.

    Raises UserError if several ranks would share a GPU.
    """
    # these show every process the same ones, unless a script between them sets this variable
    is_shared = ranks.launcher in ("torchrun", "deepspeed") and "CUDA_VISIBLE_DEVICES" not in os.environ
    if visible == 1 and not (is_shared and ranks.local_world_size > 1):
        return 0
    if visible < ranks.local_world_size:
        raise UserError(
            f"{ranks.local_world_size} ranks on this node, but {format_count(visible, 'visible GPU')} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): start at most "
            f"{format_count(visible, 'rank')} per node, or show each process one GPU"
        )
    return ranks.local_rank


def set_deepspeed_variables(ranks: Ranks, index: int) -> None:
    """Set the variables that DeepSpeed reads, whatever the launcher. index: that of this rank's device.

    `ranks()` still returns what the launcher has set.
    """
    global _launched
    # DeepSpeed selects the device with index LOCAL_RANK, which need not be the rank on the node
    numbers = {"RANK": ranks.rank, "WORLD_SIZE": ranks.world_size, "LOCAL_RANK": index}
    written = {name: str(value) for name, value in numbers.items()}
    if ranks.address is not None and ranks.port is not None:
        written |= {"MASTER_ADDR": ranks.address, "MASTER_PORT": str(ranks.port)}
    os.environ.update(written)
    _launched = written, ranks


@contextmanager
def restored_variables() -> Iterator[None]:
    """Restore, after the block, the variables that `set_deepspeed_variables` sets: other code reads them too."""
    global _launched
    launched = _launched
    before = {name: os.environ.get(name) for name in VARIABLES}
    try:
        yield
    finally:
        _launched = launched
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def describe_launch(ranks: Ranks, device: str) -> str:
    """Describe the launcher, the ranks and the device in one line."""
    if ranks.world_size == 1:
        return f"started by {ranks.launcher}: one rank, on {device}"
    nodes = "one node" if ranks.nodes == 1 else f"{ranks.nodes} nodes"
    return (
        f"started by {ranks.launcher}: {ranks.world_size} ranks on {nodes}, rank 0 on {device}; "
        f"they meet at {ranks.address}:{ranks.port}"
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: `gpu-003` of `gpu-[003-010],n7`. Raises UserError without one."""
    parts = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodelist.strip())
    if parts is None:
        raise UserError(f"SLURM's list of nodes is {nodelist!r}, which names no host: export MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", parts.group())


def _read_variables(environment: Mapping[str, str]) -> Ranks:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
    if missing:
        (present,) = {"RANK", "WORLD_SIZE"} - set(missing)
        raise UserError(f"{present}={environment[present]}, but {missing[0]} is not set: {ADVICE}")
    rank, world_size = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE", least=1)
    # deepspeed uses another name for the ranks on a node, and both may be missing where variables are set by hand
    local_name = "LOCAL_RANK" if "LOCAL_RANK" in environment else "SLURM_LOCALID"
    size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "LOCAL_SIZE"
    local_rank = _integer(environment, local_name, 0)
    local_world_size = _integer(environment, size_name, local_rank + 1, least=1)
    for name, value, size_of, size in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        (local_name, local_rank, size_name, local_world_size),
    ):
        if value >= size:
            raise UserError(f"{name}={value}, but {size_of}={size}: ranks count from 0 to {size - 1}")
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher, nodes = "torchrun", _integer(environment, "GROUP_WORLD_SIZE", 1, least=1)
    elif "CROSS_SIZE" in environment:
        launcher, nodes = "deepspeed", _integer(environment, "CROSS_SIZE", least=1)
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


def _read_srun(environment: Mapping[str, str]) -> Ranks:
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    rank, tasks = _integer(environment, "SLURM_PROCID"), _integer(environment, tasks_name, 1, least=1)
    if rank >= tasks:
        raise UserError(f"SLURM_PROCID={rank}, but {tasks_name}={tasks}: start each task with srun itself")
    if tasks == 1:
        return Ranks(0, 0, 1, 1, "srun")
    local_rank = _integer(environment, "SLURM_LOCALID", 0)
    per_node = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(local_rank + 1)))
    node = _integer(environment, "SLURM_NODEID", 0)
    known = node < len(per_node) and local_rank < per_node[node]
    local_world_size = per_node[node] if known else max(*per_node, local_rank + 1)
    address = environment.get("MASTER_ADDR") or first_host(
        environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    )
    if environment.get("MASTER_PORT"):
        port = _port(environment)
    else:
        # consecutive jobs, and the steps of one job, may share a node
        job, step = _integer(environment, "SLURM_JOB_ID", 0), _integer(environment, "SLURM_STEP_ID")
        port = FIRST_PORT + (job * 101 + step) % PORTS
    nodes = _integer(environment, "SLURM_STEP_NUM_NODES", len(per_node), least=1)
    return Ranks(rank, local_rank, tasks, local_world_size, "srun", nodes, address, port)


def _tasks_per_node(text: str) -> list[int]:
    """Return `4(x2),3` as [4, 4, 3]."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(parts):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text}: no list such as 4(x2),3; start each task with srun itself")
    return [int(part[1]) for part in parts if part is not None for _ in range(int(part[2] or 1))]


def _integer(environment: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise UserError(f"{name} is not set: {ADVICE}")
        return default
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < least:
        raise UserError(f"{name}={text}: must be an integer of at least {least}; {ADVICE}")
    return int(text)


def _port(environment: Mapping[str, str]) -> int:
    port = _integer(environment, "MASTER_PORT", least=1)
    if port > 65535:
        raise UserError(f"MASTER_PORT={port}: ports count from 1 to 65535")
    return port
