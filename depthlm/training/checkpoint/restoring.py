"""Where a run goes on from: its own newest checkpoint, or one it is forked from; and how the engine gets there.

The ranks and the ZeRO stage that wrote a checkpoint need not be those that load it:

    stage then -> now      ranks as many        ranks another number
    0 -> 0                 plain                plain
    1, 2 -> 1, 2           plain                DeepSpeed's universal checkpoint
    3 -> 3                 plain                DeepSpeed's universal checkpoint
    any other              refused              refused
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
from depthlm.runs.checkpoints import (
    STATE,
    CheckpointError,
    checkpoint_of,
    checkpoint_path,
    newest_checkpoint,
    read_manifest,
)
from depthlm.training.plan import Plan
from depthlm.training.state import Progress

log = logging.getLogger("depthlm")
# stages whose optimizer states DeepSpeed 0.19.8 brings into each other
KINDS = {0: "whole", 1: "flat", 2: "flat", 3: "sharded"}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint a run starts from. universal: other ranks wrote it, so it must be converted first."""

    path: Path
    manifest: dict[str, Any]
    forked: bool
    universal: bool


def find_resume_point(config: Config, plan: Plan, corpus: str) -> ResumePoint | None:
    """The checkpoint that this run goes on from; None: it starts anew.

    corpus: the digest of the token files. Raises UserError where there is one that this run cannot go on from.
    """
    try:
        own = newest_checkpoint(Path(config.output_dir or ""))
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
                f"{path} was trained on other tokens than those prepared now; bring back the text they were made of, "
                "or give another output_dir="
            )
        log.info("forked onto other tokens than those of %s", path)
    if manifest["step"] > plan.max_steps:
        raise UserError(
            f"{path} has done {manifest['step']} steps, more than the {plan.max_steps} of this run; make it longer by "
            "training.max_steps"
        )
    universal = _check_stage(path, manifest, config.deepspeed.stage, plan.world_size)
    if own is None:
        _check_fork(path, manifest, config)
    return ResumePoint(path, manifest, own is None, universal)


def restore(engine: Any, start: ResumePoint | None, directory: Path) -> Progress:
    """Bring the engine to where the run in a directory starts; collective. Returns how far it is."""
    if start is None:
        return Progress()
    folder = on_rank_0(lambda: _convert(start.path, directory)) if start.universal else None
    _load(engine, start, folder)
    progress = read_progress(start.manifest)
    if start.forked:
        progress.wandb_id = None
        log.info("forked from %s: %d steps done", start.path, progress.step)
    else:
        log.info("resumed from %s: %d steps done", start.path, progress.step)
    return progress


def rewind_to(config: Config, plan: Plan, engine: Any, step: int) -> Progress | None:
    """Bring the engine back to the checkpoint of a step of this run; collective. Returns how far the run was then.

    None, and the log says why, where that checkpoint is gone or not whole; the engine is as it was.
    """

    directory = Path(config.output_dir or "")

    def find() -> tuple[ResumePoint, Path | None]:
        path = checkpoint_path(directory, step)
        manifest = read_manifest(path)
        start = ResumePoint(
            path, manifest, False, _check_stage(path, manifest, config.deepspeed.stage, plan.world_size)
        )
        return start, _convert(path, directory) if start.universal else None

    try:
        start, folder = on_rank_0(find)
    except (UserError, OSError) as error:
        log.info("the run does not go back to step %d: %s", step, error)
        return None
    _load(engine, start, folder)
    return read_progress(start.manifest)


def _load(engine: Any, start: ResumePoint, converted: Path | None) -> None:
    if converted is None:
        return load_engine(engine, start.path)
    load_engine(engine, converted, universal=True)
    torch.distributed.barrier()
    on_rank_0(lambda: shutil.rmtree(converted))
    now = torch.distributed.get_world_size()
    log.info("brought the optimizer from %d ranks to %d through the converted one", start.manifest["world_size"], now)


def read_progress(manifest: dict[str, Any]) -> Progress:
    """How far a run was when the checkpoint was written."""
    names = {field.name for field in dataclasses.fields(Progress)}
    return Progress(**{name: value for name, value in manifest.items() if name in names})


def load_engine(engine: Any, path: Path, universal: bool = False) -> None:
    """Bring weights, optimizer and engine back from a whole checkpoint; collective. Raises CheckpointError.

    The settings of the optimizer's groups stay those of the engine.
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
    # a fork may have other settings, and the universal load of ZeRO 3 gives every group those of the first
    for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(own)
    if universal:
        # it also gives the states of all groups one and the same counter, which then runs as many times too fast
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _check_stage(path: Path, manifest: dict[str, Any], now: int, world_size: int) -> bool:
    """Whether the checkpoint must be converted. Raises UserError where DeepSpeed cannot bring it to this stage."""
    before = manifest["stage"]
    if KINDS[before] != KINDS[now]:
        raise UserError(
            f"{path} was written at ZeRO {before}, and DeepSpeed cannot bring an optimizer from there to ZeRO {now}; "
            f"go on with deepspeed=zero{before}, or start with its weights alone: import_from={path.parent.parent}"
        )
    return before > 0 and manifest["world_size"] != world_size


def _check_fork(path: Path, manifest: dict[str, Any], config: Config) -> None:
    """Say what differs. Raises UserError where the state cannot be taken over: another model, or another optimizer."""
    now = dataclasses.asdict(config)
    differences = compare(manifest["config"], now)
    # at stage 0 weights and states are fp32 whatever the precision
    fixed = ("model.", "backbone.", "size.", "optimizer.name", *(["precision.name"] if config.deepspeed.stage else []))
    if wrong := [name for name in differences if name.startswith(fixed)]:
        listed = "\n".join(f"  - {name}: {differences[name]}" for name in wrong)
        raise UserError(
            f"fork_from={path}: its weights and optimizer fit only the same model, optimizer and precision:\n{listed}\n"
            f"Give the same, or start with its weights alone: import_from={path.parent.parent}"
        )
    for name, words in differences.items():
        log.info("forked with another setting: %s: %s", name, words)


def _convert(path: Path, directory: Path) -> Path:
    """DeepSpeed's universal checkpoint, in the directory of a run, of this or another run's checkpoint."""
    folder = directory / "checkpoints" / f".universal-{path.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size = sum(file.stat().st_size for file in (path / STATE).iterdir())
    free = shutil.disk_usage(folder).free
    # the slices lie there a second time until they are merged
    if free < 2 * size:
        raise UserError(
            f"{path}: to go on with another number of ranks it is converted, which needs {2 * size / 2**30:.1f} GiB "
            f"in {folder.parent}; {free / 2**30:.1f} GiB are free"
        )
    log.info("converting %s for another number of ranks", path)
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
         "--input_folder", str(path / STATE), "--output_folder", str(folder / STATE)],
        capture_output=True, text=True, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        raise CheckpointError(f"{path}: DeepSpeed could not convert it ({done.stderr.strip()[-500:]})")
    return folder
