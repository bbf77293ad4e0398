"""Non-finite losses and gradients, and loss spikes: what is logged, skipped and rewound."""

import logging
import math
from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from depthlm.config.schema import Training
from depthlm.training.monitoring.metrics import finite
from depthlm.training.state import Progress, Run

log = logging.getLogger("depthlm")

MAX_WINDOWS_LOGGED = 8


class DivergedError(RuntimeError):
    """Raised when the policy ends the run because of a non-finite loss or gradient."""


def spike_limit(training: Training, recent_losses: Sequence[float], tokens: int) -> float:
    """Return the summed loss (nats) above which a batch of `tokens` tokens is a spike; infinity if it cannot be one.

    recent_losses: the losses of the newest updates, in nats per token.
    """
    if training.spike_deviations is None or len(recent_losses) < max(2, training.spike_window / 2):
        return math.inf
    limit = (fmean(recent_losses) + training.spike_deviations * stdev(recent_losses)) * tokens
    # rounded to fp32, in which the device compares: it must skip exactly the batches that are logged as spikes
    return torch.tensor(limit, dtype=torch.float32).item()


def handle_nonfinite(run: Run, progress: Progress, nll: float, limit: float, scale: float) -> None:
    """Record whether the step just taken, progress.step, was applied; if it was not, apply the policy.

    nll: the summed loss of the global batch (nats). limit: the loss above which it is a spike. scale: the loss scale
    of the step. Collective, with the same arguments on every rank. Raises DivergedError if the policy ends the run.
    """
    training, step = run.config.training, progress.step
    loss = nll / run.plan.tokens_per_step
    spike = limit < nll < math.inf
    if run.engine.step_applied():
        if spike:
            record_bad_batch(run, step, "kept", spike_text(loss, progress.recent_losses), loss)
        if training.spike_deviations is not None:
            progress.recent_losses = [*progress.recent_losses, loss][-training.spike_window :]
        return
    progress.skipped.append(step)
    fp16, smallest = run.engine.fp16, run.config.precision.min_loss_scale
    skip_spike = spike and training.on_spike == "skip"
    if fp16 and scale > smallest and math.isfinite(nll) and not skip_spike:
        progress.overflows.append(step)
        log.info("step %d skipped: its gradient overflows fp16 at a loss scale of %g, which is too large", step, scale)
        return
    if skip_spike:
        reason, policy = spike_text(loss, progress.recent_losses), "skip"
    elif not math.isfinite(nll):
        reason, policy = "its loss is not finite", training.on_nonfinite
    else:
        at_smallest = f", at the smallest loss scale, precision.min_loss_scale={smallest:g}" if fp16 else ""
        reason, policy = f"the norm of its gradient is not finite{at_smallest}", training.on_nonfinite
    if policy == "stop":
        raise DivergedError(
            f"{record_bad_batch(run, step, 'ends the run', reason, loss)}. The weights are unchanged; the same command "
            f"with training.on_nonfinite=skip output_dir={run.directory} resumes from the last checkpoint and skips "
            "this batch; training.on_nonfinite=rewind also skips the batches since the last regular checkpoint"
        )
    record_bad_batch(run, step, rewind(run, progress) if policy == "rewind" else "skipped", reason, loss)
    if (count := in_a_row(progress)) > training.max_skipped:
        raise DivergedError(
            f"{count} bad batches in a row, the last at step {step}: {reason}. That is more than training.max_skipped="
            f"{training.max_skipped}; lower optimizer.lr and start a new run with another output_dir="
        )


def rewind(run: Run, progress: Progress) -> str:
    """Undo all updates since the newest regular checkpoint, and count their batches as skipped; collective.

    Returns the outcome in words. Without such a checkpoint only the last batch is skipped.
    """
    # checkpoints written for a signal or by the clock are not used: they would make the result depend on timing
    every = run.config.training.checkpoint_every
    start = (progress.step - 1) // every * every
    if start == 0:
        return "skipped (no regular checkpoint to rewind to yet)"
    run.watch.mark("rewinding to a checkpoint", progress.step)
    if run.saver.writing is not None:
        run.saver.finish()
    restored = run.rewind_to(start)
    if restored is None:
        return "skipped without a rewind"
    progress.recent_losses = restored.recent_losses
    for steps in (progress.skipped, progress.overflows):
        steps[:] = [step for step in steps if step <= start]
    progress.skipped.extend(range(start + 1, progress.step + 1))
    progress.rewound.append([start, progress.step])
    return f"skipped with all steps since step {start}"


def in_a_row(progress: Progress) -> int:
    """Return the number of bad batches since the newest update that was kept; each rewind counts as one."""
    skipped, applied = set(progress.skipped), progress.step
    while applied in skipped:
        applied -= 1
    rewinds = [(start, end) for start, end in progress.rewound if end > applied]
    undone = {step for start, end in rewinds for step in range(start + 1, end + 1)}
    alone = {step for step in progress.skipped if step > applied} - undone - set(progress.overflows)
    return len(rewinds) + len(alone)


def spike_text(loss: float, recent_losses: Sequence[float]) -> str:
    """Describe how far a loss is above the recent ones; all in nats per token."""
    mean, deviation = fmean(recent_losses), stdev(recent_losses)
    deviations = (loss - mean) / deviation if deviation else math.inf
    return f"its loss {loss:.2f} is a spike: {deviations:.1f} standard deviations above the mean {mean:.2f}"


def record_bad_batch(run: Run, step: int, outcome: str, reason: str, loss: float) -> str:
    """Append a bad batch and all its windows to bad_batches.jsonl, and log it unless it ends the run.

    Returns the log line, which lists only the first windows.
    """
    windows = run.windows(step)
    line = f"step {step} {outcome}: {reason}; its batch is {windows_text(windows)} (bad_batches.jsonl)"
    if torch.distributed.get_rank() == 0:
        norm = finite(run.engine.grad_norm())
        numbers = {"reason": reason, "loss": finite(loss), "grad_norm": norm}
        run.bad_batches.write({"step": step, "outcome": outcome, **numbers, "samples": windows})
        if outcome != "ends the run":
            log.warning("%s", line)
    return line


def windows_text(windows: dict[str, list[int]]) -> str:
    """Describe the windows of a batch by source; only the first few are listed."""
    parts = []
    for name, numbers in windows.items():
        rest = f" and {len(numbers) - MAX_WINDOWS_LOGGED} more" if len(numbers) > MAX_WINDOWS_LOGGED else ""
        parts.append(f"windows {', '.join(map(str, numbers[:MAX_WINDOWS_LOGGED]))}{rest} of {name}")
    return ", ".join(parts)
