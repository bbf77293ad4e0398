"""One run from a configuration to its summary: what happens before the loop, and after it."""

import dataclasses
import gc
import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthlm import environment
from depthlm.analysis import count_parameters, flops_per_token
from depthlm.build import build_model
from depthlm.config import Config, prepare_command
from depthlm.data import Batches, Corpus, check_prepared, loader, open_corpus, prepare
from depthlm.environment import Ranks
from depthlm.errors import UserError
from depthlm.model import compile_sublayers
from depthlm.training.checkpoints import load_engine, newest_checkpoint
from depthlm.training.describe import derived, show_summary
from depthlm.training.display import show_table, start_logging
from depthlm.training.dry_run import dry_run
from depthlm.training.engine import build_engine, leave_distributed, start_distributed
from depthlm.training.finish import final_losses, finish, show_sample
from depthlm.training.import_weights import import_weights
from depthlm.training.loop import DivergedError, Progress, Run, train_steps
from depthlm.training.metrics import MetricsFile, peak_flops
from depthlm.training.plan import Plan, make_plan
from depthlm.training.run_directory import check_run_directory, finished, open_run_directory
from depthlm.training.sharding import undo_sharding
from depthlm.training.signals import stop_on_signal
from depthlm.training.trackers import NoTracker, Tracker, start_tracker
from depthlm.training.validation import diagnoser, validator

log = logging.getLogger("depthlm")

COMPLETE, FAILED, STOPPED = 0, 1, 75


def train(config: Config) -> int:
    """Train a checked configuration, or go on with it. Returns the exit code.

    0 complete, 75 stopped by a signal with everything saved, 1 diverged.

    Raises UserError for what only the user can mend: another run in the directory, data that is missing.
    """
    ranks = environment.ranks()
    first = ranks.rank == 0
    torch.set_num_threads(config.training.num_threads or environment.threads(ranks))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    forget_the_run_before()
    start_logging(None, ranks.rank)
    # the first rank alone: another may look after it has begun to write there
    directory = check_run_directory(config) if first else Path(config.output_dir or "")
    summary = finished(directory)
    if summary is not None and not config.dry_run:
        show_summary("This run is complete", directory, summary, ranks.rank)
        return COMPLETE
    # on every rank: one that ended alone would leave the others waiting for it
    check_prepared(config.data, partial(prepare_command, config))
    device = start_distributed(ranks)
    if first:
        prepare(config.data)
    torch.distributed.barrier()
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
    with ExitStack() as held:
        if first and not config.dry_run:
            held.enter_context(open_run_directory(config, ranks))
            corpus.tokenizer.save(directory)
            start_logging(directory / "train.log", ranks.rank)
        return train_in(directory, config, ranks, plan, corpus, batches, device)


def train_in(
    directory: Path,
    config: Config,
    ranks: Ranks,
    plan: Plan,
    corpus: Corpus,
    batches: Batches,
    device: torch.device,
) -> int:
    """Train in a run directory that is this process's alone. Returns the exit code."""
    first = ranks.rank == 0
    model = build_model(config, device=device)
    if config.import_from is not None:
        import_weights(config, model, directory)
    model.activation_checkpointing = config.training.activation_checkpointing
    model.end_of_text = corpus.tokenizer.end_of_text if config.data.document_mask else None
    parameters = count_parameters(model)["total"]
    flops = flops_per_token(model, plan.sequence_length).training
    show_table("depthlm", derived(config, plan, corpus, batches, model, flops), ranks.rank)
    if config.training.compile:
        compile_sublayers(model)
    engine = build_engine(config, plan, model)
    if config.dry_run:
        dry_run(config, plan, batches, engine, device)
        leave_distributed()
        return COMPLETE
    progress = resume(directory, engine, corpus.digest(), ranks.world_size)
    metrics = open_metrics(directory, progress.step)
    tracker: Tracker = NoTracker()
    if first:
        settings = dataclasses.asdict(config)
        tracker = start_tracker(config.tracker, directory, directory.name, settings, progress.wandb_id)
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
        validate=validator(config, plan, corpus, model, device),
        diagnose=diagnoser(config, plan, corpus, model, device),
        parameters=parameters,
        flops_per_token=flops,
        peak_flops=peak_flops(environment.device_name(), config.precision.name),
        metrics=metrics,
        tracker=tracker,
    )
    summary = None
    try:
        with stop_on_signal() as request:
            whole = train_steps(run, progress, request)
        if progress.step == plan.max_steps:
            losses = final_losses(run)
            summary = finish(run, progress, corpus, losses) if first else None
            show_sample(run, model, corpus)
    except DivergedError as error:
        log.error("%s", error)
        leave_distributed()
        return FAILED
    finally:
        tracker.close(summary)
        # else its hooks on the weights keep it in memory, beside the next point of a sweep
        engine.destroy()
    leave_distributed()
    if not whole:
        log.info("stopped by a signal after step %d; the same command goes on from there", progress.step)
        return STOPPED
    if progress.step < plan.max_steps:
        log.info("stopped after step %d of %d, as training.stop_after says", progress.step, plan.max_steps)
    return COMPLETE


def forget_the_run_before() -> None:
    """Free what an earlier point of a sweep held in this process, and its peak memory (of a GPU; a CPU's stays)."""
    undo_sharding()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def resume(directory: Path, engine: Any, corpus: str, world_size: int) -> Progress:
    """Bring the engine to the newest whole checkpoint, if there is one; every rank takes the first rank's choice.

    corpus: the digest of the token files. Raises UserError where the checkpoint was trained on others, or where its
    optimizer is sharded over another number of ranks.
    """
    choice: list[Any] = [newest_checkpoint(directory) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(choice)
    if choice[0] is None:
        return Progress(corpus=corpus, world_size=world_size)
    path, manifest = choice[0]
    if manifest["corpus"] != corpus:
        raise UserError(
            f"{path} was trained on other tokens than those prepared now; bring back the text they were made of, "
            "or give another output_dir="
        )
    if engine.zero_optimization_stage() > 0 and manifest["world_size"] != world_size:
        raise UserError(
            f"{path} shards its optimizer over {manifest['world_size']} ranks, and there are {world_size} now; "
            "start as many again (deepspeed=zero0 resumes on any number)"
        )
    load_engine(engine, path)
    names = {field.name for field in dataclasses.fields(Progress)}
    progress = Progress(**{name: value for name, value in manifest.items() if name in names})
    progress.world_size = world_size
    log.info("resumed from %s: %d steps done", path, progress.step)
    return progress


def open_metrics(directory: Path, after_step: int) -> MetricsFile:
    """metrics.jsonl of the first rank; the others know its newest row, so that all decide alike."""
    metrics = MetricsFile(directory / "metrics.jsonl" if torch.distributed.get_rank() == 0 else None, after_step)
    last = [metrics.last]
    torch.distributed.broadcast_object_list(last)
    metrics.last = last[0]
    return metrics
