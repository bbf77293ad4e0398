"""Find the checkpoint from which a run resumes or forks, and load it into the engine.

The number of ranks and the ZeRO stage may differ between saving and loading:

    saved -> loaded stage  same number of ranks  another number of ranks
    0 -> 0                 direct                direct
    1, 2 -> 1, 2           direct                DeepSpeed's universal checkpoint
    3 -> 3                 direct                DeepSpeed's universal checkpoint
    any other              refused               refused
"""

import dataclasses
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from depthlm.config import Config
from depthlm.config.saved import compare
from depthlm.distributed.collectives import on_rank_0
from depthlm.errors import UserError
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import (
    STATE,
    CheckpointError,
    checkpoint_of,
    newest_checkpoint,
    read_manifest,
)
from depthlm.training.plan import Plan
from depthlm.training.state import Progress

log = logging.getLogger("depthlm")
# DeepSpeed 0.19.8 can convert optimizer states between stages of the same layout
STATE_LAYOUTS = {0: "replicated", 1: "flat", 2: "flat", 3: "sharded"}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint a run starts from. universal: another number of ranks wrote it, so it must be converted first."""

    path: Path
    manifest: dict[str, Any]
    forked: bool
    universal: bool


def find_resume_point(config: Config, plan: Plan, corpus: str) -> ResumePoint | None:
    """Return the checkpoint from which this run resumes or forks; None if it starts from scratch.

    corpus: the digest of the token files. Raises UserError if this run cannot use the checkpoint.
    """
    try:
        own = newest_checkpoint(RunDirectory.of(config.output_dir).path)
    except CheckpointError:
        if config.resume != "retrain":
            raise
        own = None
    if own is None and config.fork_from is None:
        return None
    path, manifest = own or checkpoint_of(Path(config.fork_from or ""), "fork_from")
    if manifest["corpus"] != corpus:
        if own is not None:
            raise UserError(
                f"{path} was trained on other tokens than those prepared now; restore the text they were made of, "
                "or give another output_dir="
            )
        log.info("forked with other tokens than those of %s", path)
    if manifest["step"] > plan.max_steps:
        raise UserError(
            f"{path} has done {manifest['step']} steps, more than the {plan.max_steps} of this run; increase "
            "training.max_steps"
        )
    universal = _check_stage(path, manifest, config.deepspeed.stage, plan.world_size)
    if own is None:
        _check_fork(path, manifest, config)
    return ResumePoint(path, manifest, own is None, universal)


def restore(engine: Any, start: ResumePoint | None, directory: Path) -> Progress:
    """Load the checkpoint that the run in `directory` starts from into the engine; collective. Returns its progress."""
    if start is None:
        return Progress()
    folder = on_rank_0(lambda: _convert(start.path, RunDirectory(directory))) if start.universal else None
    _load(engine, start, folder)
    progress = read_progress(start.manifest)
    if start.forked:
        progress.wandb_id = None
        log.info("forked from %s: %d steps done", start.path, progress.step)
    else:
        log.info("resumed from %s: %d steps done", start.path, progress.step)
    return progress


def rewind_to(config: Config, plan: Plan, engine: Any, step: int) -> Progress | None:
    """Load the checkpoint of an earlier step of this run into the engine; collective. Returns the progress there.

    Returns None and logs the reason if that checkpoint is missing or invalid; the engine is then unchanged.
    """

    run = RunDirectory.of(config.output_dir)

    def find_checkpoint() -> tuple[ResumePoint, Path | None]:
        path = run.checkpoint(step)
        manifest = read_manifest(path)
        start = ResumePoint(
            path, manifest, False, _check_stage(path, manifest, config.deepspeed.stage, plan.world_size)
        )
        return start, _convert(path, run) if start.universal else None

    try:
        start, folder = on_rank_0(find_checkpoint)
    except (UserError, OSError) as error:
        log.info("cannot rewind to step %d: %s", step, error)
        return None
    _load(engine, start, folder)
    return read_progress(start.manifest)


def _load(engine: Any, start: ResumePoint, converted: Path | None) -> None:
    if converted is None:
        return load_engine(engine, start.path)
    load_engine(engine, converted, universal=True)
    torch.distributed.barrier()
    on_rank_0(lambda: shutil.rmtree(converted))
    world_size = torch.distributed.get_world_size()
    log.info("converted the checkpoint of %d ranks and loaded it on %d ranks", start.manifest["world_size"], world_size)


def read_progress(manifest: dict[str, Any]) -> Progress:
    """Return the progress of the run at the checkpoint."""
    names = {field.name for field in dataclasses.fields(Progress)}
    return Progress(**{name: value for name, value in manifest.items() if name in names})


def load_engine(engine: Any, path: Path, universal: bool = False) -> None:
    """Load weights, optimizer and engine state from a valid checkpoint; collective. Raises CheckpointError.

    The optimizer groups keep the settings of the engine, not those of the checkpoint.
    """
    groups = engine.optimizer.param_groups
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    engine._config.load_universal_checkpoint = universal
    try:
        loaded, _ = engine.load_checkpoint(str(path), tag=STATE)
    finally:
        engine._config.load_universal_checkpoint = False
    if loaded is None:
        raise CheckpointError(f"{path}: DeepSpeed found no state in it")
    # a fork may have other settings, and loading a universal ZeRO 3 checkpoint gives every group those of group 0
    for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(own)
    if universal:
        # the states of all groups then share one step counter, which every group would increment
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _check_stage(path: Path, manifest: dict[str, Any], stage: int, world_size: int) -> bool:
    """Return whether the checkpoint must be converted. Raises UserError if DeepSpeed cannot load it at this stage."""
    saved_stage = manifest["stage"]
    if STATE_LAYOUTS[saved_stage] != STATE_LAYOUTS[stage]:
        raise UserError(
            f"{path} was written at ZeRO {saved_stage}, and DeepSpeed cannot convert its optimizer to ZeRO {stage}; "
            f"resume with deepspeed=zero{saved_stage}, or start with its weights alone: init_from={path.parent.parent}"
        )
    return saved_stage > 0 and manifest["world_size"] != world_size


def _check_fork(path: Path, manifest: dict[str, Any], config: Config) -> None:
    """Log the settings that differ. Raises UserError if the state cannot be used: another model or optimizer."""
    current = dataclasses.asdict(config)
    differences = compare(manifest["config"], current)
    # at stage 0 weights and optimizer states are fp32 at any precision
    fixed = ("model.", "backbone.", "size.", "optimizer.name", *(["precision.name"] if config.deepspeed.stage else []))
    if conflicts := [name for name in differences if name.startswith(fixed)]:
        lines = "\n".join(f"  - {name}: {differences[name]}" for name in conflicts)
        raise UserError(
            f"fork_from={path}: its weights and optimizer fit only the same model, optimizer and precision:\n{lines}\n"
            f"Use the same settings, or start with its weights alone: init_from={path.parent.parent}"
        )
    for name, words in differences.items():
        log.info("forked with another setting: %s: %s", name, words)


def _convert(path: Path, run: RunDirectory) -> Path:
    """Convert a checkpoint to DeepSpeed's universal format in a staging directory of the run. Returns its path."""
    folder = run.universal(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size = sum(file.stat().st_size for file in (path / STATE).iterdir())
    free = shutil.disk_usage(folder).free
    # the slices take the same space again until they are merged
    if free < 2 * size:
        raise UserError(
            f"{path}: for another number of ranks it is converted, which needs {2 * size / 2**30:.1f} GiB "
            f"in {folder.parent}; {free / 2**30:.1f} GiB are free"
        )
    log.info("converting %s for another number of ranks", path)
    process = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
         "--input_folder", str(path / STATE), "--output_folder", str(folder / STATE)],
        capture_output=True, text=True, start_new_session=True,
    )  # fmt: skip
    if process.returncode:
        raise CheckpointError(f"{path}: DeepSpeed could not convert it ({process.stderr.strip()[-500:]})")
    return folder
