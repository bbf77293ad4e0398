"""The results of a complete run: summary.json, the loss curve, a sample."""

import json
import logging
from typing import Any

import torch

from depthlm.data import Corpus
from depthlm.evaluation import generate, perplexity
from depthlm.files import replace_text
from depthlm.model import Decoder
from depthlm.run_directory import RunDirectory
from depthlm.runs.loss_curve import plot_loss
from depthlm.training.engine import autocast
from depthlm.training.loop import Progress, Run
from depthlm.training.monitoring.describe import show_summary
from depthlm.training.monitoring.metrics import peak_memory_gib

log = logging.getLogger("depthlm")


def final_losses(run: Run) -> dict[str, float | None]:
    """Return the losses and perplexities of the last step, from metrics.jsonl or measured again; collective."""
    last = run.metrics.last
    if last.get("step") == run.plan.max_steps and run.metrics.validated:
        return {name: loss for name, loss in last.items() if name.startswith("validation/")}
    return run.validate()


def finish(run: Run, progress: Progress, corpus: Corpus, losses: dict[str, float | None]) -> dict[str, Any]:
    """Write summary.json and the loss curve of a complete run, and print its summary. Returns the summary."""
    set_losses = [loss for name, loss in losses.items() if name.endswith("/loss")]
    finite = [loss for loss in set_losses if loss is not None]
    mean = sum(finite) / len(set_losses) if len(finite) == len(set_losses) else None
    tokens_per_second = progress.tokens / progress.wall_seconds
    flops_per_second = tokens_per_second * run.flops_per_token / run.plan.world_size
    summary = {
        "parameters": run.parameters,
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_loss": run.metrics.last.get("loss"),
        "validation_loss": mean,
        "validation_perplexity": perplexity(mean),
        **losses,
        "unigram_entropy": corpus.unigram_entropy,
        "forward_flops_per_token": run.flops_per_token / 3,
        "training_flops": run.flops_per_token * progress.tokens,
        "tokens_per_second": tokens_per_second,
        "mfu": flops_per_second / run.peak_flops if run.peak_flops else None,
        "wall_seconds": progress.wall_seconds,
        "peak_memory_gib": peak_memory_gib(run.device),
        "skipped": progress.skipped,
    }
    replace_text(RunDirectory(run.directory).summary, json.dumps(summary, indent=1) + "\n")
    try:
        plot_loss(run.directory, corpus.unigram_entropy)
    except OSError as error:
        log.warning("the loss curve cannot be drawn (%s)", error)
    show_summary("This run is complete", run.directory, summary, 0)
    return summary


def show_sample(run: Run, model: Decoder, corpus: Corpus) -> None:
    """Log the model's continuation of training.sample; collective, since at ZeRO 3 no rank can compute alone."""
    prompt = run.config.training.sample
    if prompt is None:
        return
    tokens = torch.tensor([[corpus.tokenizer.end_of_text, *corpus.tokenizer.encode_batch([prompt])[0]]])
    generator = torch.Generator(run.device).manual_seed(run.config.seed)
    # compiling for every length of a sample would take longer than the sample
    with autocast(run.config, run.device), torch.compiler.set_stance("force_eager"):
        sampled = generate(model, tokens.to(run.device), 64, temperature=0.7, top_k=50, generator=generator)
    log.info("a sample:\n%s", corpus.tokenizer.decode(sampled[0, 1:].tolist()))
