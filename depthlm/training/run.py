"""One run from its configuration to its exit code: everything before and after the training loop."""

import dataclasses
import logging
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from depthlm.accounting.cost import assumption, cost_rows, gpu_hours
from depthlm.config import Config
from depthlm.counts import duration_text
from depthlm.distributed.launchers import Ranks
from depthlm.distributed.process_group import on_rank_0
from depthlm.distributed.signals import stop_on_signal
from depthlm.errors import UserError
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import missing_part, retrain
from depthlm.runs.directory import (
    Claim,
    DirectoryLostError,
    check_run_directory,
    check_shared,
    describe_run,
    lock_run_directory,
    mark_directory,
    record_failure,
    write_failure,
    write_reason,
)
from depthlm.training.checkpoint.init_from import check_token_ids
from depthlm.training.checkpoint.restoring import find_resume_point, restore
from depthlm.training.checkpoint.saving import NotSavedError, Saver
from depthlm.training.graphs import EAGER_STEPS, make_graphs
from depthlm.training.monitoring.describe import show_next_commands, show_summary
from depthlm.training.monitoring.display import log_to, show_table
from depthlm.training.monitoring.metrics import peak_memory_gib
from depthlm.training.nonfinite import DivergedError
from depthlm.training.setup import build, prepare_run, process_group, start_process
from depthlm.training.step import dropout_seeds, train_step
from depthlm.training.trainer import COMPLETE, Trainer

log = logging.getLogger("depthlm")

FAILED = 1


def train(config: Config) -> int:
    """Train a validated configuration, or resume its run. With dry_run, only time a step. Returns the exit code.

    0: complete; 75: stopped by a signal, state saved; 1: diverged, or the last checkpoint could not be written.

    Raises UserError for what only the user can fix, such as another run in the directory, or missing data.
    """
    if config.dry_run:
        dry_run(config)
        return COMPLETE
    ranks = start_process(config)
    directory = RunDirectory.of(config.output_dir).path
    with record_failure(directory, ranks.rank) as claim, ExitStack() as stack:
        try:
            trainer = set_up(config, ranks, claim, stack)
            return COMPLETE if trainer is None else trainer.fit()
        except (DivergedError, NotSavedError, DirectoryLostError) as error:
            log.error("%s", error)
            write_failure(claim, error, ranks.rank)
            return FAILED
        except SystemExit as error:
            if error.code:
                raise
            # a scheduler, and the other ranks, would take this for a complete run
            raise RuntimeError("sys.exit(0) was called before the run was complete") from error


def set_up(config: Config, ranks: Ranks, claim: Claim, stack: ExitStack) -> Trainer | None:
    """Return the trainer of a run at the step where it starts or resumes; None if the run is complete. Collective.

    claim: to the run directory. stack: receives what is released after training: the process group, the signal
    handlers and the lock.
    """
    paths = RunDirectory.of(config.output_dir)
    device, activity = stack.enter_context(process_group(config, ranks))
    summary = on_rank_0(lambda: check_run_directory(config))
    if summary is not None:
        show_complete(config, summary, ranks.rank)
        return None
    claim.accepted = True
    setup = prepare_run(config, ranks, device, activity)
    request = stack.enter_context(stop_on_signal(activity.report))
    on_rank_0(lambda: stack.enter_context(lock_run_directory(claim)))
    # check again: another process may have trained this run before the lock was taken
    summary = on_rank_0(lambda: check_run_directory(config))
    if summary is not None:
        show_complete(config, summary, ranks.rank)
        return None
    start = on_rank_0(lambda: find_resume_point(config, setup.plan, setup.corpus.digest()))
    if start is None or start.forked:
        on_rank_0(lambda: check_token_ids(config, setup.corpus.tokenizer))
    if config.evaluation.every is not None:
        from depthlm.evaluation.online import check_evaluation, missing_results

        # each rank reads the names of the tasks now, so that a later change of their files does not matter
        missing_results(config, {})
        on_rank_0(lambda: check_evaluation(config, setup.corpus.tokenizer, starting=start is None))
    saved = None if start is None or start.forked else start.manifest.step
    on_rank_0(lambda: describe_run(config, ranks, setup.plan.max_steps, saved or 0))
    check_shared(paths.path, ranks.rank, on_rank_0(lambda: mark_directory(claim)))
    if ranks.rank == 0:
        activity.record = partial(write_reason, claim)
        setup.corpus.tokenizer.save(paths.path)
        log_to(paths.log)
    engine, cost = build(setup, import_initial=start is None)
    progress = restore(engine, start, paths.path)
    manifest = {
        "corpus": setup.corpus.digest(),
        "world_size": ranks.world_size,
        "stage": config.deepspeed.stage,
        "experts": config.deepspeed.experts,
        "config": dataclasses.asdict(config),
    }
    saver = Saver(engine, paths.path, config.training, manifest, saved)
    return Trainer(setup, engine, cost, progress, saver, request, claim)


def show_complete(config: Config, summary: dict[str, Any], rank: int) -> None:
    """Print the summary of a complete run, and warn if its last checkpoint is lost.

    Raises UserError if profiling was requested, since no step is left to profile.
    """
    directory = RunDirectory.of(config.output_dir).path
    if config.training.profile:
        raise UserError(
            f"training.profile=true: the run in {directory} is complete, so there is no step left to profile; profile "
            f"another run, as in output_dir={directory}-profile"
        )
    missing = missing_part(directory, summary["steps"])
    title = "This run is complete" if missing is None else "This run was complete, and its last checkpoint is lost"
    show_summary(title, directory, summary, rank)
    if missing is not None:
        log.warning("%s; %s", missing, retrain(directory))
    elif rank == 0:
        show_next_commands(config)


def dry_run(config: Config) -> None:
    """Check a validated configuration, take a few steps on the global batch, and print their peak memory and time.

    No run directory is written. Raises UserError if the run could not start.
    """
    ranks = start_process(config)
    with process_group(config, ranks) as (device, activity):
        on_rank_0(lambda: check_run_directory(config))
        setup = prepare_run(config, ranks, device, activity)
        on_rank_0(lambda: check_token_ids(config, setup.corpus.tokenizer))
        engine, cost = build(setup, import_initial=True)
        plan, batch, graphs = setup.plan, setup.batches[0], make_graphs(config, setup.plan, engine)
        if graphs is not None:
            graphs.make_room(batch)
        batch, seeds, seconds = batch.to(device), dropout_seeds(config, 0, setup.batches), []
        losses: list[float] = []
        # the last step is timed: the first one allocates optimizer states and compiles, and graphs are captured later
        for _ in range(2 if graphs is None else EAGER_STEPS + 2):
            started = time.perf_counter()
            losses.append(train_step(engine, batch, plan, config.training.z_loss, seeds=seeds, graphs=graphs))
            seconds.append(time.perf_counter() - started)
        if device.type == "cuda":
            hours, source = seconds[-1] * plan.max_steps * plan.world_size / 3600, "at the speed of this step"
        else:
            mechanism = config.model.name
            hours, source = gpu_hours(cost.flops_per_token * plan.total_tokens, mechanism), assumption(mechanism)
        rows = {
            "peak memory": f"{peak_memory_gib(device):.2f} GiB"
            + (" on the largest rank" if plan.world_size > 1 else ""),
            "step": f"{seconds[-1]:.2f} s ({seconds[0]:.2f} s the first), "
            f"{plan.tokens_per_step / seconds[-1]:,.0f} tokens/s",
            "whole run": f"about {duration_text(seconds[-1] * plan.max_steps)} of steps",
            **cost_rows(hours, source, config.price),
            "loss": f"{losses[1] / plan.tokens_per_step:.4f} after one step",
        }
        show_table("One full-size step", rows, torch.distributed.get_rank())
