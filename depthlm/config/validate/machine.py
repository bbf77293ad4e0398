"""Checks of a configuration against a machine: its ranks, devices, files and packages. All mistakes are reported."""

import importlib.util
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from depthlm.config.resolve import tokenizer_exists
from depthlm.config.schema import Config
from depthlm.config.validate.checks import check_share
from depthlm.config.validate.decoder import check_divides
from depthlm.config.validate.pipeline import check_pipeline_ranks
from depthlm.data import Manifest, token_folder, train_sources, validation_sources
from depthlm.distributed import launchers
from depthlm.errors import UserError
from depthlm.locations import install_command
from depthlm.machine import environment
from depthlm.run_directory import RunDirectory, is_checkpoint


def check_machine(config: Config) -> list[str]:
    """Return the mistakes that only this machine has: its ranks, its device, its files, a package not installed."""
    ranks = launchers.ranks().world_size
    return [
        *_check_experts(config, ranks),
        *check_pipeline_ranks(config, ranks),
        *_check_device(config),
        *check_text(config),
        *_check_files(config),
        *_check_tracker(config),
    ]


def check_text(config: Config, only: Collection[str] = ()) -> list[str]:
    """Return the text and the tokenizer that this machine does not have. only: names of sources; empty: all of them."""
    data, errors = config.data, []
    for name, source in (train_sources(data) | validation_sources(data)).items():
        if only and name not in only:
            continue
        key = "data" if source is data else f"data.{'validation' if name in data.validation else 'sources'}.{name}"
        if not (source.source or source.path or source.hub or name == "stdlib"):
            errors.append(f"{key}.source: {name} needs text; give {key}.source=<a folder, or a file>")
        is_missing = source.source is not None and not Path(source.source).exists()
        if is_missing and not (tokenizer_exists(config) and Manifest.exists(token_folder(name, source, data))):
            errors.append(f"{key}.source={source.source}: no such folder or file")
    if not tokenizer_exists(config):
        errors.append(
            f"data.tokenizer={data.tokenizer}: not bpe, not bytes, no such tokenizer.json, and no model of the hub "
            "(owner/name)"
        )
    return errors


def check_ranks(config: Config, ranks: int) -> list[str]:
    """Return the mistakes of a batch, or of experts, that this number of ranks cannot share."""
    return [*check_share(config, ranks), *_check_experts(config, ranks), *check_pipeline_ranks(config, ranks)]


def check_starts(config: Config, starts: set[str]) -> list[str]:
    """Return an error for each key in `starts` whose run, another point of the experiment, is not complete.

    A run that already has checkpoints is not checked, nor is a key whose value is itself a checkpoint.
    """
    errors = []
    for key in sorted(starts):
        start = getattr(config, key, None)
        if start is None or _holds_checkpoints(config.output_dir or "") or is_checkpoint(Path(start)):
            continue
        if Path(start).exists() and not RunDirectory(Path(start)).summary.exists():
            errors.append(f"{key}={start}: that point of the experiment is not complete; train it first")
    return errors


def _check_experts(config: Config, ranks: int) -> list[str]:
    experts = config.deepspeed.experts
    if config.backbone.mlp != "experts" or config.deepspeed.stage == 3 or config.size.num_experts % experts:
        # another mistake
        return []
    return check_divides("deepspeed.experts", experts, f"the number of ranks of this run, {ranks}", ranks)


def _check_device(config: Config) -> list[str]:
    errors, device = [], environment.device_type(config.device)
    if error := environment.device_error(config.device):
        errors.append(error)
    if config.precision.name == "fp16" and device == "cpu":
        hint = "; budget=smoke tries the experiment in fp32" if config.experiment.name else ""
        errors.append(f"precision=fp16: DeepSpeed refuses fp16 on a CPU; allowed here: fp32, bf16, auto{hint}")
    from depthlm.ops.backend import launch_lacks, missing

    if config.kernels == "naive" and config.precision.name in ("bf16", "fp16"):
        given = f"kernels=naive with precision={config.precision.name}"
        errors.append(f"{given}: the definitions are for fp32; allowed: precision=fp32, or kernels=torch")
    if config.kernels == "triton" and (reason := missing(device)):
        errors.append(f"kernels=triton: {reason}; allowed here: kernels=auto or torch")
    if config.training.compile is True and device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        errors.append(
            "training.compile=true: torch.compile on a CPU needs a C++ compiler; install g++ or clang++, "
            "or leave it out"
        )
    if config.training.compile is True and device == "cuda" and (reason := launch_lacks()):
        errors.append(f"training.compile=true: torch.compile on a GPU uses Triton; {reason}")
    return errors


def _check_files(config: Config) -> list[str]:
    # it imports torch
    from depthlm.pretrained.folder import differences, is_pretrained, read_pretrained

    errors: list[str] = []
    if not config.output_dir:
        return ["output_dir=: empty; leave it out, or give the run directory"]
    if config.init_from is not None and config.fork_from is not None:
        errors.append("init_from and fork_from: both given; init_from takes only the weights, fork_from the full state")
    for key, start in (("init_from", config.init_from), ("fork_from", config.fork_from)):
        if start is None or any(map(_holds_checkpoints, (config.output_dir, start))):
            continue
        if key == "init_from" and is_pretrained(Path(start)):
            try:
                errors += differences(read_pretrained(Path(start)), vars(config))
            except UserError as error:
                errors.append(str(error))
        else:
            errors.append(f"{key}={start}: no checkpoint in it; give a run directory, or one of its checkpoints")
    folder = Path(config.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        errors.append(f"output_dir={config.output_dir}: {existing} is not a folder that this user may write to")
    return errors


def _holds_checkpoints(directory: str) -> bool:
    return is_checkpoint(Path(directory)) or bool(RunDirectory.of(directory).checkpoint_folders())


def _check_tracker(config: Config) -> list[str]:
    if not config.tracker.tensorboard or importlib.util.find_spec("tensorboard") is not None:
        return []
    return [f"tracker=tensorboard: tensorboard is not installed; {install_command('trackers')}"]
