"""The checks of `doctor` on the machine and on the configuration of a run."""

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from depthlm.config import Config, ConfigError, compose, compose_anywhere, prepare_command
from depthlm.counts import gib_text
from depthlm.data import DataError, Manifest, check_prepared, token_folders
from depthlm.distributed import launchers
from depthlm.doctor.command import OK, PROBLEM, WARNING, Item, c_compiler, cpp_compiler
from depthlm.errors import UserError
from depthlm.machine import environment
from depthlm.machine.environment import probe
from depthlm.machine.memory import available_memory, cgroup_limits
from depthlm.ops.backend import missing
from depthlm.run_directory import RunDirectory
from depthlm.runs.directory import check_run_directory
from depthlm.runs.weights_and_biases import has_key
from depthlm.training.memory_check import SAFE_SHARE, check_memory

# seconds to wait for a connection to W&B's server
CONNECTION_TIMEOUT = 3.0
# bytes below which even a small run may fail
LOW_MEMORY, LOW_SHARED_MEMORY, LOW_DISK = 2 * 2**30, 256 * 2**20, 5 * 2**30


def checks(overrides: Sequence[str], config_dir: str | None) -> dict[str, Callable[[], Item | Iterable[Item]]]:
    """Return the checks for a run with these overrides, by name."""
    errors: list[str] = []
    try:
        config = compose_anywhere(overrides, config_dir)
    except ConfigError as error:
        # the other checks are those of a run with the default configuration
        config, errors = compose_anywhere(), error.errors
    device_type = environment.device_type(config.device)
    return {
        "device": partial(device, config.device),
        "driver": driver,
        "NCCL": partial(communication, device_type),
        "C compiler": partial(c_compiler, device_type),
        "C++ compiler": partial(cpp_compiler, device_type, config.training.compile is True),
        "memory": memory,
        "shared memory": shared_memory,
        "disk, run": partial(disk, "disk, run", Path(config.output_dir or "outputs")),
        "disk, tokens": partial(disk, "disk, tokens", Path(config.data.path or "data/tokens")),
        "W&B": partial(wandb, config),
        "ranks": partial(ranks, config),
        "precision": partial(precision, device_type, config.size.hidden_size),
        "kernels": partial(kernels, device_type),
        "configuration": partial(configuration, overrides, config_dir, errors),
        **start_checks(overrides, config_dir),
    }


def start_checks(overrides: Sequence[str], config_dir: str | None) -> dict[str, Callable[[], Item | Iterable[Item]]]:
    """Return the checks that a run makes when it starts; none for a configuration that train.py does not accept."""
    try:
        config = compose(overrides, config_dir)
    except ConfigError:
        # the items "configuration" and "device" say why
        return {}
    return {
        "run directory": partial(run_directory, config),
        "memory of run": partial(run_memory, config),
        "data of run": partial(run_data, config),
    }


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


def wandb(config: Config) -> Item:
    """Check whether W&B receives metrics during training."""
    tracker = config.tracker
    if not tracker.wandb or os.environ.get("WANDB_MODE") == "disabled":
        return Item("W&B", "not used; metrics.jsonl is always written")
    offline = tracker.mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
    if offline or not has_key():
        why = "as configured" if offline else "no key is set; `wandb login` sets one, tracker=none turns W&B off"
        return Item("W&B", f"offline ({why}); `wandb sync` uploads a run")
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0]
    address, _, port = host.partition(":")
    try:
        socket.create_connection((address, int(port or 443)), timeout=CONNECTION_TIMEOUT).close()
    except OSError as error:
        remedy = "a run starts, and switches to offline after up to 60 s; tracker.mode=offline avoids the wait"
        return Item(
            "W&B",
            f"a key is set, but {host} does not answer within {CONNECTION_TIMEOUT:.0f} s ({error})",
            WARNING,
            remedy,
        )
    return Item("W&B", f"online: a key is set, and {host} answers")


def ranks(config: Config) -> Iterator[Item]:
    """Report the launcher of this process, and the CPU cores and threads of each rank."""
    try:
        process_ranks = launchers.ranks()
    except UserError as error:
        yield Item("ranks", "the launcher's variables contradict each other", PROBLEM, str(error))
        return
    yield Item("ranks", launchers.describe_launch(process_ranks, "this machine"))
    launcher, local_ranks = process_ranks.launcher, process_ranks.local_world_size
    threads = environment.threads(config.training.num_threads, launcher, local_ranks)
    yield Item("cores", f"{environment.cores()} of {os.cpu_count()} for this process, {threads}")


def precision(device_type: str, width: int) -> Item:
    """Report the value of precision=auto on this machine. width: the hidden size."""
    value = environment.fast_precision(device_type, width)
    return Item("precision", f"precision=auto is {value} here with size.hidden_size={width}")


def kernels(device_type: str) -> Item:
    """Report the value of kernels=auto on this machine."""
    reason = missing(device_type) if device_type == "cuda" else "Triton needs a GPU"
    if reason is None:
        return Item("kernels", "kernels=auto is Triton here")
    return Item("kernels", f"kernels=auto is PyTorch here: {reason}", WARNING if device_type == "cuda" else OK)


def configuration(overrides: Sequence[str], config_dir: str | None, errors: list[str]) -> Item:
    """Check whether train.py accepts the overrides on this machine. errors: those that do not depend on the machine."""
    shown = " ".join(overrides) or "the default"
    if not errors:
        try:
            compose(overrides, config_dir)
        except ConfigError as error:
            # the item "device" already shows errors of the device
            errors = [text for text in error.errors if not text.startswith("device=")]
    if errors:
        return Item("configuration", "; ".join(errors), PROBLEM, "python train.py --help lists every key")
    return Item("configuration", f"{shown}: no errors")


def run_directory(config: Config) -> Item:
    """Check whether this configuration may start, or resume, in its run directory."""
    directory = config.output_dir or ""
    try:
        summary = check_run_directory(config)
    except UserError as error:
        return Item("run directory", str(error), PROBLEM, "give another output_dir=")
    if summary is not None:
        return Item("run directory", f"{directory}: this run is complete")
    resumes = bool(RunDirectory.of(directory).checkpoint_folders())
    return Item("run directory", f"{directory}: the run {'resumes' if resumes else 'starts from scratch'}")


def run_memory(config: Config) -> Item:
    """Check whether the run fits in the memory of a rank."""
    import torch

    process_ranks = launchers.ranks()
    device = torch.device(environment.device_type(config.device))
    available = available_memory(device, process_ranks.local_world_size)
    try:
        estimate = check_memory(config, process_ranks, device, available)
    except UserError as error:
        what, _, remedy = str(error).partition("\n")
        return Item("memory of run", what, PROBLEM, remedy)
    if estimate is None:
        return Item("memory of run", "not checked: the decoder or the optimizer cannot be traced", WARNING)
    value = f"{gib_text(estimate.total)} estimated, {gib_text(available)} for each rank"
    if estimate.total > SAFE_SHARE * available:
        return Item("memory of run", value, WARNING, "a smaller training.micro_batch_size= takes less")
    return Item("memory of run", value)


def run_data(config: Config) -> Item:
    """Check whether the data is prepared, or small enough for training to prepare it."""
    try:
        check_prepared(config.data, partial(prepare_command, config))
    except DataError as error:
        return Item("data of run", f"{error.what}: {error.where}", PROBLEM, error.remedy)
    missing = [name for name, folder in token_folders(config.data).items() if not Manifest.exists(folder)]
    state = f"the run prepares {', '.join(missing)} when it starts" if missing else "prepared"
    return Item("data of run", f"{config.data.name}: {state}")


def memory_limits() -> tuple[int, int, int | None]:
    """Return the machine's RAM, its free RAM, and the smallest limit of this process's control groups, in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0]: 1024 * int(words[1]) for words in lines}
    total = sizes["MemTotal:"]
    limit = min(cgroup_limits(), default=total)
    return total, sizes["MemAvailable:"], limit if limit < total else None
