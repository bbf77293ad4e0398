"""One run from its configuration to its summary: everything before and after the training loop."""

import dataclasses
import gc
import logging
import os
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthlm.accounting import count_parameters, flops_per_token
from depthlm.accounting.memory import Memory
from depthlm.build import build_model
from depthlm.config import Config, prepare_command
from depthlm.data import Batches, Corpus, check_prepared, loader, open_corpus, prepare
from depthlm.distributed import launchers
from depthlm.distributed.collectives import on_rank_0, smallest
from depthlm.distributed.launchers import Ranks
from depthlm.distributed.process_group import leave_distributed, start_distributed
from depthlm.distributed.signals import STOPPED, StopRequest, end_on_signal, stop_on_signal
from depthlm.distributed.watchdog import Activity, watch_ranks
from depthlm.errors import UserError
from depthlm.machine import environment
from depthlm.machine.memory import available_memory
from depthlm.model import compile_sublayers
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import lost, retrain
from depthlm.runs.directory import (
    check_run_directory,
    check_shared,
    describe_run,
    lock_run_directory,
    record_failure,
    write_failure,
)
from depthlm.runs.trackers import NoTracker, Tracker, start_tracker
from depthlm.training.checkpoint.init_from import import_weights
from depthlm.training.checkpoint.restoring import ResumePoint, find_resume_point, restore, rewind_to
from depthlm.training.checkpoint.saving import NotSavedError, Saver
from depthlm.training.dry_run import dry_run
from depthlm.training.engine import build_engine, undo_sharding
from depthlm.training.finish import final_losses, finish, show_sample
from depthlm.training.loop import train_steps
from depthlm.training.memory_check import check_memory
from depthlm.training.monitoring.describe import derived, show_summary
from depthlm.training.monitoring.display import log_to, show_table, start_logging
from depthlm.training.monitoring.metrics import MetricsFile, peak_flops
from depthlm.training.nonfinite import DivergedError
from depthlm.training.plan import Plan, make_plan
from depthlm.training.state import Run
from depthlm.training.validation import ValidationStopped, diagnoser, validator

log = logging.getLogger("depthlm")

COMPLETE, FAILED = 0, 1


def train(config: Config) -> int:
    """Train a validated configuration, or resume its run. Returns the exit code.

    0: complete; 75: stopped by a signal, state saved; 1: diverged, or the last checkpoint could not be written.

    Raises UserError for what only the user can fix, such as another run in the directory, or missing data.
    """
    ranks = launchers.ranks()
    torch.set_num_threads(config.training.num_threads or environment.threads(ranks))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    forget_the_run_before()
    start_logging(ranks.rank)
    directory = RunDirectory.of(config.output_dir).path
    with nullcontext() if config.dry_run else record_failure(directory, ranks.rank):
        return train_together(config, ranks)


def train_together(config: Config, ranks: Ranks) -> int:
    """Join the process group, train, and leave the group. Returns the exit code."""
    training = config.training
    # longer than the watchdog's timeouts, so that the watchdog acts first: it can name the rank to blame
    timeout = timedelta(minutes=2 * training.stall_timeout, seconds=training.rank_timeout)
    device = start_distributed(ranks, timeout, device_choice=config.device)
    try:
        with (
            watch_ranks(ranks, training.rank_timeout, training.stall_timeout) as activity,
            end_on_signal(activity.report),
        ):
            try:
                code = train_on(config, ranks, device, activity)
            except (DivergedError, NotSavedError) as error:
                log.error("%s", error)
                write_failure(RunDirectory.of(config.output_dir).path, error, ranks.rank)
                code = FAILED
            leave_distributed()
    except UserError:
        leave_distributed(together=False)
        raise
    return code


def train_on(config: Config, ranks: Ranks, device: torch.device, activity: Activity) -> int:
    """Check, prepare the data and train; rank 0 decides for all ranks. Returns the exit code."""
    directory = RunDirectory.of(config.output_dir).path
    summary = on_rank_0(lambda: check_run_directory(config))
    if summary is not None and not config.dry_run:
        return show_complete(config, summary, ranks.rank)
    available = smallest(available_memory(device, ranks.local_world_size), device)
    memory = on_rank_0(lambda: check_memory(config, ranks, device, available))
    on_rank_0(lambda: check_prepared(config.data, partial(prepare_command, config)))
    activity.mark("preparing the data", 0, limited=False)
    on_rank_0(lambda: prepare(config.data))
    activity.mark("starting", 0, limited=False)
    corpus = open_corpus(config.data)
    plan = make_plan(config, ranks, corpus.windows(config.training.sequence_length))
    batches = Batches(
        corpus.train,
        weights=corpus.weights,
        sequence_length=plan.sequence_length,
        batch_size=plan.batch_size,
        seed=config.seed if config.data.shuffle_seed is None else config.data.shuffle_seed,
        micro_batch=plan.micro_batch_size,
        rank=ranks.rank,
        ranks=ranks.world_size,
    )
    if config.dry_run:
        request = StopRequest(activity.report)
        return train_from(None, config, ranks, plan, corpus, batches, device, activity, request, memory)
    with ExitStack() as stack:
        request = stack.enter_context(stop_on_signal(activity.report))
        on_rank_0(lambda: stack.enter_context(lock_run_directory(directory)))
        # check again: another process may have trained this run before the lock was taken
        summary = on_rank_0(lambda: check_run_directory(config))
        if summary is not None:
            return show_complete(config, summary, ranks.rank)
        start = on_rank_0(lambda: find_resume_point(config, plan, corpus.digest()))
        on_rank_0(lambda: describe_run(config, ranks))
        check_shared(directory, ranks.rank)
        if ranks.rank == 0:
            corpus.tokenizer.save(directory)
            log_to(RunDirectory(directory).log)
        return train_from(start, config, ranks, plan, corpus, batches, device, activity, request, memory)


def show_complete(config: Config, summary: dict[str, Any], rank: int) -> int:
    """Print the summary of a complete run, and warn if its last checkpoint is lost. Returns the exit code.

    Raises UserError if profiling was requested, since no step is left to profile.
    """
    directory = RunDirectory.of(config.output_dir).path
    if config.training.profile:
        raise UserError(
            f"training.profile=true: the run in {directory} is complete, so there is no step left to profile; profile "
            f"another run, as in output_dir={directory}-profile"
        )
    show_summary("This run is complete", directory, summary, rank)
    if missing := lost(directory, summary["steps"]):
        log.warning("its last checkpoint is not: %s; %s", missing, retrain(directory))
    return COMPLETE


def train_from(
    start: ResumePoint | None,
    config: Config,
    ranks: Ranks,
    plan: Plan,
    corpus: Corpus,
    batches: Batches,
    device: torch.device,
    activity: Activity,
    request: StopRequest,
    memory: Memory | None,
) -> int:
    """Train from a checkpoint, or from scratch, in the locked run directory. Returns the exit code."""
    is_rank_0, paths = ranks.rank == 0, RunDirectory.of(config.output_dir)
    directory = paths.path
    model = build_model(config, device=device)
    if config.init_from is not None and start is None:
        import_weights(config, model)
    if config.training.activation_checkpointing:
        model.checkpoint_activations()
    model.end_of_text = corpus.tokenizer.end_of_text if config.data.document_mask else None
    parameters = count_parameters(model)["total"]
    flops = flops_per_token(model, plan.sequence_length).training
    show_table("depthlm", derived(config, plan, corpus, batches, model, flops, memory), ranks.rank)
    if config.training.compile:
        compile_sublayers(model)
    engine = build_engine(config, plan, model)
    if config.dry_run:
        dry_run(config, plan, batches, engine, device)
        return COMPLETE
    progress = restore(engine, start, directory)
    metrics = open_metrics(paths.metrics, progress.step)
    block_rows, logs_blocks = paths.sublayer_norms, config.training.log_blocks_every is not None
    settings = dataclasses.asdict(config)
    tracker: Tracker = NoTracker()
    if is_rank_0:
        tracker = start_tracker(config.tracker, directory, directory.name, settings, progress.wandb_id)
    manifest = {
        "corpus": corpus.digest(),
        "world_size": ranks.world_size,
        "stage": config.deepspeed.stage,
        "config": settings,
    }
    steps = loader(
        batches, progress.step, plan.last_step, num_workers=config.data.num_workers, pin_memory=device.type == "cuda"
    )
    run = Run(
        config=config,
        plan=plan,
        directory=directory,
        engine=engine,
        device=device,
        batches=iter(steps),
        seen=batches.seen if len(corpus.train) > 1 else None,
        windows=lambda step: batches.windows(step - 1),
        rewind_to=partial(rewind_to, config, plan, engine),
        validate=validator(config, plan, corpus, model, device, activity, request),
        diagnose=diagnoser(config, plan, corpus, model, device),
        parameters=parameters,
        flops_per_token=flops,
        peak_flops=peak_flops(environment.device_name(device.type), config.precision.name),
        metrics=metrics,
        bad_batches=MetricsFile(paths.bad_batches if is_rank_0 else None, progress.step),
        blocks=MetricsFile(block_rows if is_rank_0 and (logs_blocks or block_rows.exists()) else None, progress.step),
        tracker=tracker,
        watch=activity,
        saver=Saver(engine, directory, config.training, manifest),
    )
    summary = None
    try:
        finished = train_steps(run, progress, request)
        activity.mark("finishing", progress.step)
        if progress.step == plan.max_steps:
            losses = final_losses(run)
            summary = finish(run, progress, corpus, losses) if is_rank_0 else None
            show_sample(run, model, corpus)
    except ValidationStopped:
        finished = False
    except DivergedError:
        if run.saver.writing is not None:
            run.saver.finish()
        raise
    finally:
        tracker.close(summary)
        # otherwise its hooks on the weights keep it in memory during the next point of a sweep
        engine.destroy()
    if not finished:
        log.info("stopped by a signal after step %d; run the same command again to resume from there", progress.step)
        return STOPPED
    if progress.step < plan.max_steps:
        log.info("stopped after step %d of %d (training.stop_after)", progress.step, plan.max_steps)
    return COMPLETE


def forget_the_run_before() -> None:
    """Free the memory of an earlier run in this process (a sweep), and reset the GPU's peak memory."""
    undo_sharding()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def open_metrics(path: Path, after_step: int) -> MetricsFile:
    """Open metrics.jsonl on rank 0; the other ranks get its newest row, so that all decide alike. Collective."""
    metrics = MetricsFile(path if torch.distributed.get_rank() == 0 else None, after_step)
    last = [metrics.last]
    torch.distributed.broadcast_object_list(last)
    metrics.last = last[0]
    return metrics
