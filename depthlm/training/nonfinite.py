"""Bad numbers: losses and gradients that are not finite, and spikes of the loss. What is told, left out, undone."""

import logging
import math
from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from depthlm.config.schema import Training
from depthlm.training.monitoring.metrics import finite
from depthlm.training.state import Progress, Run

log = logging.getLogger("depthlm")

WINDOWS_TOLD = 8


class DivergedError(RuntimeError):
    """Numbers for which the run ends, by its policy."""


def spike_limit(training: Training, recent_losses: Sequence[float], tokens: int) -> float:
    """The loss of a batch of so many tokens (nats, summed) above which it is a spike; infinite where none can be.

    recent_losses: those of the newest updates, in nats per token.
    """
    if training.spike_deviations is None or len(recent_losses) < max(2, training.spike_window / 2):
        return math.inf
    limit = (fmean(recent_losses) + training.spike_deviations * stdev(recent_losses)) * tokens
    # the device compares in fp32, and what it leaves out must be what is told as a spike
    return torch.tensor(limit, dtype=torch.float32).item()


def handle_nonfinite(run: Run, progress: Progress, nll: float, limit: float, scale: float) -> None:
    """Account for the step just taken, progress.step: whether it was applied, why not, and what follows.

    nll: the loss of its whole batch (nats, summed). limit: above which that is a spike. scale: the loss scale it had.
    The same on every rank, and collective. Raises DivergedError where the run ends.
    """
    training, step = run.config.training, progress.step
    loss = nll / run.plan.tokens_per_step
    spike = limit < nll < math.inf
    if run.engine.was_step_applied():
        if spike:
            tell(run, step, "kept", spike_text(loss, progress.recent_losses), loss)
        if training.spike_deviations is not None:
            progress.recent_losses = [*progress.recent_losses, loss][-training.spike_window :]
        return
    progress.skipped.append(step)
    fp16, smallest = run.engine.fp16_enabled(), run.config.precision.min_loss_scale
    leave_out_spike = spike and training.on_spike == "skip"
    if fp16 and scale > smallest and math.isfinite(nll) and not leave_out_spike:
        progress.overflows.append(step)
        log.info("step %d left out: its gradient overflows fp16 at a loss scale of %g, which is too large", step, scale)
        return
    if leave_out_spike:
        reason, policy = spike_text(loss, progress.recent_losses), "skip"
    elif not math.isfinite(nll):
        reason, policy = "its loss is not finite", training.on_bad_numbers
    else:
        at_smallest = f", at the smallest loss scale, precision.min_loss_scale={smallest:g}" if fp16 else ""
        reason, policy = f"the norm of its gradient is not finite{at_smallest}", training.on_bad_numbers
    if policy == "stop":
        raise DivergedError(
            f"{tell(run, step, 'ends the run', reason, loss)}. Nothing of it reached the weights; the same command "
            f"with training.on_bad_numbers=skip output_dir={run.directory} goes on from the last checkpoint and leaves "
            "this batch out, with rewind also those before it"
        )
    tell(run, step, rewind(run, progress) if policy == "rewind" else "left out", reason, loss)
    if (count := in_a_row(progress)) > training.max_skipped:
        raise DivergedError(
            f"{count} bad batches in a row, the last at step {step}: {reason}. That is more than training.max_skipped="
            f"{training.max_skipped}; lower optimizer.lr, and give another output_dir="
        )


def rewind(run: Run, progress: Progress) -> str:
    """Undo all updates since the newest regular checkpoint, and count their batches as left out; collective.

    Returns what was done, in words. Without such a checkpoint the last batch alone is left out.
    """
    # one made for a signal or by the clock must not decide how the run goes on
    every = run.config.training.checkpoint_every
    start = (progress.step - 1) // every * every
    if start == 0:
        return "left out, with no regular checkpoint yet to go back to,"
    run.watch.mark("going back to a checkpoint", progress.step)
    if run.saver.writing is not None:
        run.saver.finish()
    then = run.rewind_to(start)
    if then is None:
        return "left out alone"
    progress.recent_losses = then.recent_losses
    for steps in (progress.skipped, progress.overflows):
        steps[:] = [step for step in steps if step <= start]
    progress.skipped.extend(range(start + 1, progress.step + 1))
    progress.rewound.append([start, progress.step])
    return f"left out with all since step {start}"


def in_a_row(progress: Progress) -> int:
    """Bad batches since the newest update that counts: those left out, and those for which the run was rewound."""
    skipped, applied = set(progress.skipped), progress.step
    while applied in skipped:
        applied -= 1
    rewinds = [(start, end) for start, end in progress.rewound if end > applied]
    undone = {step for start, end in rewinds for step in range(start + 1, end + 1)}
    alone = {step for step in progress.skipped if step > applied} - undone - set(progress.overflows)
    return len(rewinds) + len(alone)


def spike_text(loss: float, recent_losses: Sequence[float]) -> str:
    """How far a loss is above the recent ones, in words; all in nats per token."""
    mean, deviation = fmean(recent_losses), stdev(recent_losses)
    deviations = (loss - mean) / deviation if deviation else math.inf
    return f"its loss {loss:.2f} is a spike: {deviations:.1f} deviations above the mean {mean:.2f}"


def tell(run: Run, step: int, outcome: str, reason: str, loss: float) -> str:
    """Add a bad batch to bad_batches.jsonl, with all its windows, and log it unless it ends the run.

    Returns the line of the log, where the windows are shortened.
    """
    windows = run.windows(step)
    line = f"step {step} {outcome}: {reason}; its batch is {windows_text(windows)} (bad_batches.jsonl)"
    if torch.distributed.get_rank() == 0:
        norm = finite(run.engine.get_global_grad_norm())
        numbers = {"reason": reason, "loss": finite(loss), "grad_norm": norm}
        run.bad_batches.write({"step": step, "outcome": outcome, **numbers, "samples": windows})
        if outcome != "ends the run":
            log.warning("%s", line)
    return line


def windows_text(windows: dict[str, list[int]]) -> str:
    """The windows of a batch, by source, shortened after a few."""
    parts = []
    for name, numbers in windows.items():
        rest = f" and {len(numbers) - WINDOWS_TOLD} more" if len(numbers) > WINDOWS_TOLD else ""
        parts.append(f"windows {', '.join(map(str, numbers[:WINDOWS_TOLD]))}{rest} of {name}")
    return ", ".join(parts)
