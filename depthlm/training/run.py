"""One run from a configuration to its summary: what happens before the loop, and after it."""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from depthlm import environment
from depthlm.analysis import flops_per_token, plot_loss
from depthlm.build import build_model
from depthlm.config import Config
from depthlm.data import Batches, Corpus, loader, open_corpus, prepare, validation_batches
from depthlm.evaluation import generate, mean_loss
from depthlm.model import Decoder, compile_sublayers
from depthlm.training.checkpoints import load_engine, newest_checkpoint
from depthlm.training.describe import derived, show_summary
from depthlm.training.display import show_table, start_logging
from depthlm.training.dry_run import dry_run
from depthlm.training.engine import autocast, build_engine, leave_distributed, start_distributed
from depthlm.training.loop import DivergedError, Progress, Run, train_steps
from depthlm.training.metrics import MetricsFile, peak_flops, peak_memory_gib, read_metrics
from depthlm.training.plan import Plan, make_plan
from depthlm.training.run_directory import check_run_directory, finished, open_run_directory
from depthlm.training.signals import stop_on_signal
from depthlm.training.trackers import NoTracker, Tracker, start_tracker

log = logging.getLogger("depthlm")

COMPLETE, FAILED, STOPPED = 0, 1, 75


def train(config: Config) -> int:
    """Train a checked configuration, or go on with it. Returns the exit code.

    0 complete, 75 stopped by a signal with everything saved, 1 diverged.

    Raises UserError for what only the user can mend: another run in the directory, data that is missing.
    """
    ranks = environment.ranks()
    first = ranks.rank == 0
    torch.set_num_threads(config.training.num_threads or max(1, environment.cores() // ranks.local_world_size))
    torch.use_deterministic_algorithms(config.deterministic)
    start_logging(None, ranks.rank)
    # the first rank alone: another may look after it has begun to write there
    directory = check_run_directory(config) if first and not config.dry_run else Path(config.output_dir or "")
    summary = finished(directory)
    if summary is not None and not config.dry_run:
        show_summary("This run is complete", directory, summary, ranks.rank)
        return COMPLETE
    device = start_distributed(ranks)
    if first:
        prepare(config.data)
    if first and not config.dry_run:
        open_run_directory(config)
        start_logging(directory / "train.log", ranks.rank)
    torch.distributed.barrier()
    plan = make_plan(config, ranks)
    corpus = open_corpus(config.data)
    batches = Batches(
        corpus.train,
        sequence_length=plan.sequence_length,
        batch_size=plan.batch_size,
        seed=config.seed,
        micro_batch=plan.micro_batch_size,
        rank=ranks.rank,
        ranks=ranks.world_size,
    )
    model = build_model(config, device=device)
    model.activation_checkpointing = config.training.activation_checkpointing
    flops = flops_per_token(model, plan.sequence_length).training
    show_table("depthlm", derived(config, plan, corpus, model, flops), ranks.rank)
    if config.training.compile:
        compile_sublayers(model)
    engine = build_engine(config, plan, model)
    if config.dry_run:
        dry_run(config, plan, batches, engine, device)
        leave_distributed()
        return COMPLETE
    progress = resume(directory, engine)
    metrics = MetricsFile(directory / "metrics.jsonl" if first else None, progress.step)
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
        validate=validator(config, plan, corpus, model, device),
        flops_per_token=flops,
        peak_flops=peak_flops(environment.device_name(), config.precision.name),
        metrics=metrics,
        tracker=tracker,
    )
    summary = None
    try:
        with stop_on_signal() as request:
            whole = train_steps(run, progress, request)
        if progress.step == plan.max_steps and first:
            summary = finish(run, progress, model, corpus)
    except DivergedError as error:
        log.error("%s", error)
        leave_distributed()
        return FAILED
    finally:
        tracker.close(summary)
    leave_distributed()
    if not whole:
        log.info("stopped by a signal after step %d; the same command goes on from there", progress.step)
        return STOPPED
    if progress.step < plan.max_steps:
        log.info("stopped after step %d of %d, as training.stop_after says", progress.step, plan.max_steps)
    return COMPLETE


def validator(
    config: Config, plan: Plan, corpus: Corpus, model: Decoder, device: torch.device
) -> Callable[[], dict[str, float]]:
    """A function that measures the mean loss (nats per token) on each validation set; collective."""

    def losses() -> dict[str, float]:
        measured = {}
        for name, tokens in corpus.validation.items():
            batches = validation_batches(
                tokens,
                plan.sequence_length,
                plan.micro_batch_size,
                config.training.validation_tokens,
                rank=torch.distributed.get_rank(),
                ranks=plan.world_size,
            )
            with autocast(config, device):
                measured[name] = mean_loss(model, batches, device)
        return measured

    return losses


def resume(directory: Path, engine: Any) -> Progress:
    """Bring the engine to the newest whole checkpoint, if there is one; every rank takes the first rank's choice."""
    choice: list[Any] = [newest_checkpoint(directory) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(choice)
    if choice[0] is None:
        return Progress()
    path, manifest = choice[0]
    load_engine(engine, path)
    names = {field.name for field in dataclasses.fields(Progress)}
    progress = Progress(**{name: value for name, value in manifest.items() if name in names})
    log.info("resumed from %s: %d steps done", path, progress.step)
    return progress


def finish(run: Run, progress: Progress, model: Decoder, corpus: Corpus) -> dict[str, Any]:
    """Write and show what the whole run came to: summary.json, the loss curve, a sample."""
    rows = list(read_metrics(run.directory / "metrics.jsonl"))
    losses = {name: loss for name, loss in rows[-1].items() if name.startswith("validation/")}
    mean = sum(losses.values()) / len(losses)
    tokens_per_second = progress.tokens / progress.wall_seconds
    flops_per_second = tokens_per_second * run.flops_per_token / run.plan.world_size
    summary = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_loss": rows[-1]["loss"],
        "validation_loss": mean,
        "validation_perplexity": math.exp(mean),
        **losses,
        "unigram_entropy": corpus.manifest.train.unigram_entropy,
        "tokens_per_second": tokens_per_second,
        "mfu": flops_per_second / run.peak_flops if run.peak_flops else None,
        "wall_seconds": progress.wall_seconds,
        "peak_memory_gib": peak_memory_gib(run.device),
        "skipped": progress.skipped,
    }
    temporary = run.directory / ".summary.json"
    temporary.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(temporary, run.directory / "summary.json")
    plot_loss(run.directory, summary["unigram_entropy"])
    show_summary("This run is complete", run.directory, summary, 0)
    prompt = run.config.training.sample
    if prompt is not None:
        tokens = torch.tensor([[corpus.tokenizer.end_of_text, *corpus.tokenizer.encode_batch([prompt])[0]]])
        generator = torch.Generator(run.device).manual_seed(run.config.seed)
        with autocast(run.config, run.device):
            sampled = generate(model, tokens.to(run.device), 64, temperature=0.7, top_k=50, generator=generator)
        log.info("a sample:\n%s", corpus.tokenizer.decode(sampled[0, 1:].tolist()))
    return summary
