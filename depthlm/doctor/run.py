"""The checks of `doctor` that depend on the configuration of a run."""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from depthlm.config import Config, ConfigError, compose, compose_anywhere
from depthlm.doctor import machine, software
from depthlm.doctor.item import OK, PROBLEM, WARNING, Item
from depthlm.machine import environment
from depthlm.ops.backend import missing
from depthlm.runs.weights_and_biases import has_key

# timeout in seconds for a connection to W&B's server
REACH = 3.0


def looks(overrides: Sequence[str], config_dir: str | None) -> dict[str, Callable[[], Item | Iterable[Item]]]:
    """Return the checks for a run with these overrides, by name."""
    config, mistakes = composed(overrides, config_dir)
    device_type = environment.device_type(config.device)
    return {
        "device": partial(machine.device, config.device),
        "driver": machine.driver,
        "NCCL": partial(machine.communication, device_type),
        "C compiler": partial(software.c_compiler, device_type),
        "C++ compiler": partial(software.cpp_compiler, device_type, config.training.compile is True),
        "memory": machine.memory,
        "shared memory": machine.shared_memory,
        "disk, run": partial(machine.disk, "disk, run", Path(config.output_dir or "outputs")),
        "disk, tokens": partial(machine.disk, "disk, tokens", Path(config.data.path or "data/tokens")),
        "W&B": partial(wandb, config),
        "ranks": machine.ranks,
        "precision": partial(precision, device_type),
        "kernels": partial(kernels, device_type),
        "configuration": partial(configuration, overrides, config_dir, mistakes),
    }


def composed(overrides: Sequence[str], config_dir: str | None) -> tuple[Config, list[str]]:
    """Return the configuration and its errors, without checks of this machine.

    If there are errors, the configuration is the default one, without the overrides.
    """
    try:
        return compose_anywhere(overrides, config_dir), []
    except ConfigError as error:
        return compose_anywhere(), error.errors


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
        socket.create_connection((address, int(port or 443)), timeout=REACH).close()
    except OSError as error:
        remedy = "a run starts, and switches to offline after up to 60 s; tracker.mode=offline avoids the wait"
        return Item("W&B", f"a key is set, but {host} does not answer within {REACH:.0f} s ({error})", WARNING, remedy)
    return Item("W&B", f"online: a key is set, and {host} answers")


def precision(device_type: str) -> Item:
    """Report the value of precision=auto on this machine."""
    return Item("precision", f"precision=auto is {environment.fast_precision(device_type)} here")


def kernels(device_type: str) -> Item:
    """Report the value of kernels=auto on this machine."""
    reason = missing(device_type) if device_type == "cuda" else "Triton needs a GPU"
    if reason is None:
        return Item("kernels", "kernels=auto is Triton here")
    return Item("kernels", f"kernels=auto is PyTorch here: {reason}", WARNING if device_type == "cuda" else OK)


def configuration(overrides: Sequence[str], config_dir: str | None, mistakes: list[str]) -> Item:
    """Check whether train.py accepts the overrides on this machine."""
    shown = " ".join(overrides) or "the default"
    errors = mistakes
    if not mistakes:
        try:
            compose(overrides, config_dir)
        except ConfigError as error:
            # the item "device" already shows errors of the device
            errors = [text for text in error.errors if not text.startswith("device=")]
    if errors:
        return Item("configuration", "; ".join(errors), PROBLEM, "python train.py --help lists every key")
    return Item("configuration", f"{shown}: no errors")
