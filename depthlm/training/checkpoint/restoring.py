"""Find the checkpoint from which a run resumes or forks, and load it into the engine.

Which checkpoints of other ranks, or another ZeRO stage, can be loaded:

    saved -> loaded stage  same number of ranks  another number of ranks
    0 -> 0                 by DeepSpeed          by DeepSpeed
    1, 2 -> 1, 2           by DeepSpeed          repartitioned by the engine
    3 -> 3                 by DeepSpeed          repartitioned by the engine
    any other              refused               refused

A checkpoint at ZeRO 1 or 2 whose experts are spread over another number of ranks is repartitioned in any case.
"""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from depthlm.build import build_model
from depthlm.config import Config
from depthlm.config.keys import validate_values
from depthlm.config.saved import compare, of_this_version
from depthlm.distributed.process_group import gather, on_rank_0
from depthlm.errors import UserError
from depthlm.optimizers.build import averages_weights, parameter_groups
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import checkpoint_of, newest_checkpoint, read_manifest, remove_leftovers
from depthlm.runs.manifest import CheckpointError, Manifest, Progress
from depthlm.training.engine import Engine
from depthlm.training.plan import Plan

log = logging.getLogger("depthlm")

# optimizer states can be loaded at stages of the same layout
STATE_LAYOUTS = {0: "replicated", 1: "flat", 2: "flat", 3: "sharded"}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint a run starts from. repartition: whether other ranks wrote the states of its optimizer."""

    path: Path
    manifest: Manifest
    forked: bool
    repartition: bool


def find_resume_point(config: Config, plan: Plan, corpus: str) -> ResumePoint | None:
    """Return the checkpoint from which this run resumes or forks; None if it starts from scratch.

    corpus: the digest of the token files. Raises UserError if this run cannot use the checkpoint.
    """
    try:
        newest = newest_checkpoint(RunDirectory.of(config.output_dir).path)
    except CheckpointError:
        if config.resume != "retrain":
            raise
        newest = None
    if newest is None and config.fork_from is None:
        return None
    path, manifest = newest or checkpoint_of(Path(config.fork_from or ""), "fork_from")
    if manifest.corpus != corpus:
        if newest is not None:
            raise UserError(
                f"{path} was trained on other tokens than those prepared now; restore the text they were made of, "
                "or give another output_dir="
            )
        log.info("forked with other tokens than those of %s", path)
    # a fork at its last step would be complete without an update of its own
    if manifest.step > plan.max_steps or (newest is None and manifest.step == plan.max_steps):
        raise UserError(
            f"{path} has done {manifest.step} steps, and this run has {plan.max_steps} in all; increase "
            "training.max_steps"
        )
    repartition = needs_repartition(path, manifest, config, plan)
    if newest is None:
        _check_fork(path, manifest, config)
    return ResumePoint(path, manifest, newest is None, repartition)


def restore(engine: Engine, start: ResumePoint | None, directory: Path) -> Progress:
    """Load the checkpoint that the run in `directory` starts from into the engine; collective. Returns its progress.

    Raises UserError if the state in it is not finite.
    """
    if start is None:
        return Progress()
    # a run that has nothing left to save would never remove them
    on_rank_0(lambda: remove_leftovers(RunDirectory(directory)))
    _load(engine, start)
    if (reason := lost_state(engine)) is not None:
        raise UserError(
            f"{start.path}: {reason}; give an older checkpoint, or remove this one to resume from an older one"
        )
    progress = start.manifest.progress()
    if start.forked:
        progress.wandb_id, progress.row = None, {}
        # the losses of its own data, length and batch decide what is a spike
        progress.recent_losses, progress.spikes = [], None
        progress.begin_interval()
        log.info("forked from %s", start.path.parent.parent)
        log.info("it had done %d steps", progress.step)
    else:
        log.info("resumed from %s: %d steps done", start.path.relative_to(directory), progress.step)
    return progress


def rewind_to(config: Config, plan: Plan, engine: Engine, step: int) -> Progress | None:
    """Load the checkpoint of an earlier step of this run into the engine; collective. Returns the progress there.

    Returns None and logs the reason if that checkpoint is missing or invalid; the engine is then unchanged.
    """
    path = RunDirectory.of(config.output_dir).checkpoint(step)

    def find_checkpoint() -> ResumePoint:
        manifest = read_manifest(path)
        return ResumePoint(path, manifest, False, needs_repartition(path, manifest, config, plan))

    try:
        start = on_rank_0(find_checkpoint)
    except (UserError, OSError) as error:
        log.info("cannot rewind to step %d: %s", step, error)
        return None
    _load(engine, start)
    return start.manifest.progress()


def needs_repartition(path: Path, manifest: Manifest, config: Config, plan: Plan) -> bool:
    """Return whether the checkpoint must be repartitioned for the ranks of this run.

    Raises UserError if it cannot be loaded at the ZeRO stage of this run.
    """
    saved, stage = manifest.stage, config.deepspeed.stage
    if STATE_LAYOUTS[saved] != STATE_LAYOUTS[stage]:
        raise UserError(
            f"{path} was written at ZeRO {saved}, and its optimizer cannot be converted to ZeRO {stage}; resume with "
            f"deepspeed=zero{saved}, or start with its weights alone: init_from={path.parent.parent}"
        )
    ranks = (plan.world_size, config.deepspeed.experts)
    return saved > 0 and (manifest.world_size, manifest.experts) != ranks


def lost_state(engine: Engine) -> str | None:
    """Describe a weight or a state of the optimizer that is not finite on some rank; None if all are. Collective."""
    names = gather(engine.nonfinite())
    rank = next((rank for rank, name in enumerate(names) if name is not None), None)
    if rank is None:
        return None
    return f"{names[rank]} is not finite" + (f" on rank {rank}" if len(names) > 1 else "")


def _load(engine: Engine, start: ResumePoint) -> None:
    if not start.repartition:
        return engine.load_state(start.path)
    engine.load_state(start.path, start.manifest.experts)
    world_size = torch.distributed.get_world_size()
    log.info("repartitioned the checkpoint of %d ranks for %d ranks", start.manifest.world_size, world_size)


def _check_fork(path: Path, manifest: Manifest, config: Config) -> None:
    """Log the settings that differ. Raises UserError if the state cannot be used: another model or optimizer."""
    current = dataclasses.asdict(config)
    differences = compare(manifest.config, current)
    # at stage 0 weights and optimizer states are fp32 at any precision
    fixed = (
        "model.",
        "backbone.",
        "size.",
        "optimizer._target_",
        *(["precision.name"] if config.deepspeed.stage else []),
        # they decide which states there are, or what the saved ones mean
        "optimizer.settings.amsgrad",
        "optimizer.settings.centered",
        *(["optimizer.betas"] if averages_weights(config.optimizer) else []),
        *(["optimizer.betas", "optimizer.settings."] if config.optimizer.needs_matrices else []),
    )
    if conflicts := [name for name in differences if name.startswith(fixed)]:
        lines = "\n".join(f"  - {name}: {differences[name]}" for name in conflicts)
        raise UserError(
            f"fork_from={path}: its weights and optimizer fit only the same model, optimizer and precision:\n{lines}\n"
            f"Use the same settings, or start with its weights alone: init_from={path.parent.parent}"
        )
    before, now = manifest.config["training"], config.training
    of_steps = (before["batch_size"] * before["sequence_length"], now.batch_size * now.sequence_length)
    if now.max_steps is None and of_steps[0] != of_steps[1]:
        raise UserError(
            f"fork_from={path}: its steps have {of_steps[0]} tokens, and those of this run {of_steps[1]}, so a length "
            "in tokens or epochs does not say where the run ends; give training.max_steps, with the steps that are done"
        )
    if any(name.startswith(("optimizer.", "parametrization.")) for name in differences):
        saved, _ = validate_values(of_this_version(manifest.config))
        if saved is not None and _group_names(saved) != _group_names(config):
            raise UserError(
                f"fork_from={path}: its optimizer has other groups of parameters, since optimizer.groups, "
                "optimizer.weight_decay or parametrization differ. Give those of the run, or start with its weights "
                f"alone: init_from={path.parent.parent}"
            )
    for name, words in differences.items():
        if name == "fork_from":
            continue
        log.info("forked with another setting: %s: %s", name, words)


def _group_names(config: Config) -> list[list[str]]:
    """Return the names of the parameters in each group of the optimizer, whose states are loaded in this order."""
    return [group["names"] for group in parameter_groups(build_model(config, "meta"), config.optimizer)]
