"""What follows from the configuration of a run, as `doctor` prints it."""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from depthlm.config import Config, ConfigError, compose
from depthlm.doctor import machine, software
from depthlm.doctor.item import OK, PROBLEM, WARNING, Item
from depthlm.kernels.backend import missing
from depthlm.machine import environment
from depthlm.runs.trackers import has_key

# seconds that W&B's server may take to answer
REACH = 3.0


def looks(overrides: Sequence[str], config_dir: str | None) -> dict[str, Callable[[], Item | Iterable[Item]]]:
    """What to look at for a run with these overrides, by name."""
    config, mistakes = composed(overrides, config_dir)
    kind = environment.device_type(config.device)
    return {
        "device": partial(machine.device, config.device),
        "driver": machine.driver,
        "NCCL": partial(machine.communication, kind),
        "C compiler": partial(software.c_compiler, kind),
        "C++ compiler": partial(software.cpp_compiler, kind, config.training.compile),
        "memory": machine.memory,
        "shared memory": machine.shared_memory,
        "disk, run": partial(machine.disk, "disk, run", Path(config.output_dir or "outputs")),
        "disk, tokens": partial(machine.disk, "disk, tokens", Path(config.data.path or "data/tokens")),
        "W&B": partial(wandb, config),
        "ranks": machine.ranks,
        "precision": partial(precision, kind),
        "kernels": partial(kernels, kind),
        "configuration": partial(configuration, overrides, config_dir, mistakes),
    }


def composed(overrides: Sequence[str], config_dir: str | None) -> tuple[Config, list[str]]:
    """The configuration, whatever this machine is, and what is wrong with it; with mistakes, that of no overrides."""
    try:
        return compose(overrides, config_dir, here=False), []
    except ConfigError as error:
        return compose([], here=False), error.errors


def wandb(config: Config) -> Item:
    """Whether curves go to W&B as they come."""
    tracker = config.tracker
    if tracker.name == "none" or os.environ.get("WANDB_MODE") == "disabled":
        return Item("W&B", "not used; metrics.jsonl is always written")
    offline = tracker.mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
    if offline or not has_key():
        why = "as asked for" if offline else "no key is set; `wandb login` sets one, tracker=none does without W&B"
        return Item("W&B", f"offline ({why}); `wandb sync` uploads a run")
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0]
    address, _, port = host.partition(":")
    try:
        socket.create_connection((address, int(port or 443)), timeout=REACH).close()
    except OSError as error:
        remedy = "a run starts, and goes on offline after up to 60 s; tracker.mode=offline does not wait"
        return Item("W&B", f"a key is set, but {host} does not answer within {REACH:.0f} s ({error})", WARNING, remedy)
    return Item("W&B", f"online: a key is set, and {host} answers")


def precision(kind: str) -> Item:
    """What precision=auto comes to."""
    return Item("precision", f"precision=auto is {environment.fast_precision(kind)} here")


def kernels(kind: str) -> Item:
    """What kernels=auto comes to."""
    lack = missing(kind) if kind == "cuda" else "Triton runs on a GPU"
    if lack is None:
        return Item("kernels", "kernels=auto is Triton here")
    return Item("kernels", f"kernels=auto is PyTorch here: {lack}", WARNING if kind == "cuda" else OK)


def configuration(overrides: Sequence[str], config_dir: str | None, mistakes: list[str]) -> Item:
    """Whether train.py takes the overrides on this machine."""
    given = " ".join(overrides) or "the default"
    errors = mistakes
    if not mistakes:
        try:
            compose(overrides, config_dir)
        except ConfigError as error:
            # those of the device have their own line
            errors = [text for text in error.errors if not text.startswith("device=")]
    if errors:
        return Item("configuration", "; ".join(errors), PROBLEM, "python train.py --help lists every key")
    return Item("configuration", f"{given}: no mistakes")
