"""The results of a complete run: summary.json, the picture of its losses, and a table."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthlm.files import replace_text
from depthlm.run_directory import RunDirectory
from depthlm.runs.loss_curve import plot_loss
from depthlm.runs.manifest import Progress
from depthlm.runs.validation_losses import ValidationLosses, perplexity
from depthlm.training.monitoring.describe import show_summary

log = logging.getLogger("depthlm")


def summary_of(
    progress: Progress,
    losses: ValidationLosses,
    last: Mapping[str, Any],
    *,
    parameters: int,
    flops_per_token: float,
    unigram_entropy: float | None,
    mfu: float | None,
    peak_memory_gib: float,
) -> dict[str, Any]:
    """Return the content of summary.json.

    losses: of the last validation. last: the last row of metrics.jsonl. flops_per_token: of a training step.
    unigram_entropy: of the corpus, in nats per token. mfu: that of the whole run.
    """
    return {
        "parameters": parameters,
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_loss": last.get("loss"),
        "validation_loss": losses.mean,
        "validation_perplexity": perplexity(losses.mean),
        **losses.row(),
        "unigram_entropy": unigram_entropy,
        "forward_flops_per_token": flops_per_token / 3,
        "training_flops": flops_per_token * progress.tokens,
        "tokens_per_second": progress.tokens_per_second,
        "mfu": mfu,
        "wall_seconds": progress.wall_seconds,
        "peak_memory_gib": peak_memory_gib,
        "skipped": progress.skipped,
    }


def write_results(directory: Path, summary: dict[str, Any]) -> None:
    """Write the summary of a complete run and draw its losses, and print the summary; on rank 0.

    Raises OSError if the summary cannot be written; without a picture of the losses, the run is complete as well.
    """
    replace_text(RunDirectory(directory).summary, json.dumps(summary, indent=1) + "\n")
    try:
        plot_loss(directory, summary["unigram_entropy"])
    except OSError as error:
        log.warning("the loss curve cannot be drawn (%s)", error)
    show_summary("This run is complete", directory, summary, rank=0)
