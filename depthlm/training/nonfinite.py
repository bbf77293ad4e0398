"""Bad batches (a non-finite loss or gradient, or a loss spike), and a state that is not finite: what follows them."""

import logging
import math
from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from depthlm.config.schema import Training
from depthlm.run_directory import RunDirectory
from depthlm.runs.manifest import Progress
from depthlm.runs.records import finite
from depthlm.runs.trackers import Trackers
from depthlm.training.checkpoint.restoring import lost_state, rewind_to
from depthlm.training.checkpoint.saving import Saver
from depthlm.training.engine import Engine
from depthlm.training.monitoring.metrics import MetricsFile
from depthlm.training.setup import Setup
from depthlm.training.step import Step

log = logging.getLogger("depthlm")


class DivergedError(RuntimeError):
    """Raised when a non-finite loss, gradient or state, or too many bad batches in a row, end the run."""


class BadBatches:
    """What follows a bad batch, and a state that is not finite: skipping, rewinding, or the end of the run.

    All methods are collective.
    """

    def __init__(self, setup: Setup, engine: Engine, progress: Progress, saver: Saver, trackers: Trackers) -> None:
        self.config, self.training, self.plan = setup.config, setup.config.training, setup.plan
        self.batches, self.activity = setup.batches, setup.activity
        self.engine, self.progress, self.saver, self.trackers = engine, progress, saver, trackers
        self.paths = RunDirectory.of(setup.config.output_dir)
        self.is_rank_0 = setup.ranks.rank == 0
        self.rows = MetricsFile(self.paths.bad_batches if self.is_rank_0 else None, progress.step)
        # of the last batch, in nats per token
        self.loss = math.nan

    def handle(self, step: Step) -> None:
        """Record whether the update of a step was applied; if it was not, apply the policy.

        Raises DivergedError if the policy, more than training.max_skipped bad batches in a row, or a state that is
        not finite end the run.
        """
        training, progress, number = self.training, self.progress, self.progress.step
        loss = self.loss = step.nll / self.plan.tokens_per_step
        spike = step.spike_limit < step.nll < math.inf
        if step.spike_limit < math.inf:
            progress.spikes = (progress.spikes or 0) + spike
        if self.engine.step_applied():
            progress.count_loss(loss)
            if spike:
                self.record("kept", spike_text(loss, progress.recent_losses))
            if training.spike_deviations is not None:
                progress.recent_losses = [*progress.recent_losses, loss][-training.spike_window :]
            return
        progress.skipped.append(number)
        skip_spike = spike and training.on_spike == "skip"
        fp16, scale, smallest = self.engine.fp16, step.loss_scale, self.config.precision.min_loss_scale
        if fp16 and scale > smallest and math.isfinite(step.nll) and not skip_spike:
            progress.overflows.append(number)
            log.info(
                "step %d skipped: its gradient overflows fp16 at a loss scale of %g, which is too large", number, scale
            )
            return
        if skip_spike:
            return self.skip(spike_text(loss, progress.recent_losses))
        if self.check_state():
            return
        if not math.isfinite(step.nll):
            reason = "its loss is not finite"
        else:
            at_smallest = f", at the smallest loss scale, precision.min_loss_scale={smallest:g}" if fp16 else ""
            reason = f"the norm of its gradient is not finite{at_smallest}"
        if training.on_nonfinite == "stop":
            raise DivergedError(
                f"{self.record('ends the run', reason)}. The weights are unchanged; the same command "
                f"with training.on_nonfinite=skip output_dir={self.paths.path} resumes from the last checkpoint and "
                "skips this batch; training.on_nonfinite=rewind also skips the batches since the last regular "
                "checkpoint"
            )
        outcome = self.rewind(reason) if training.on_nonfinite == "rewind" else "skipped"
        if outcome is not None:
            self.skip(reason, outcome)

    def check_state(self) -> bool:
        """Rewind if the weights or the states of the optimizer are not finite on some rank. Returns whether it did.

        Raises DivergedError if training.on_nonfinite is not rewind, or if there is no finite checkpoint to rewind to.
        """
        if (reason := lost_state(self.engine)) is None:
            return False
        rewinds = self.training.on_nonfinite == "rewind"
        why_not = self.rewind(reason) if rewinds else ""
        if why_not is None and lost_state(self.engine) is None:
            return True
        advice = "" if rewinds else f"; training.on_nonfinite=rewind output_dir={self.paths.path} would return there"
        raise DivergedError(
            f"{self.record('ends the run', reason)}. This state is not saved, and an update with a finite gradient led "
            f"to it. The same command resumes from the last checkpoint{advice}. If it ends there again, lower "
            "optimizer.lr; if it does not, check the memory of this machine"
        )

    def skip(self, reason: str, outcome: str = "skipped") -> None:
        """Record that the last batch is skipped. Raises DivergedError if it is one too many."""
        self.record(outcome, reason)
        self.check_count(reason)

    def rewind(self, reason: str) -> str | None:
        """Undo all updates since the newest regular checkpoint, and count their batches as skipped.

        Returns None if it did, otherwise what happens to the last batch instead. Raises DivergedError if it is one
        rewind too many.
        """
        # checkpoints written for a signal or by the clock are not used: they would make the result depend on timing
        every = self.training.checkpoint_every
        start = (self.progress.step - 1) // every * every
        if start == 0:
            return "skipped (no regular checkpoint to rewind to yet)"
        self.activity.mark("rewinding to a checkpoint", self.progress.step)
        if self.saver.writing is not None:
            self.saver.finish()
        restored = rewind_to(self.config, self.plan, self.engine, start)
        if restored is None:
            return "skipped without a rewind"
        self.progress.rewind(restored)
        self.record(f"skipped with all steps since step {start}", reason)
        self.check_count(reason)
        return None

    def check_count(self, reason: str) -> None:
        """Raise DivergedError after more than training.max_skipped bad batches in a row."""
        if (count := self.progress.bad_in_a_row()) > self.training.max_skipped:
            raise DivergedError(
                f"{count} bad batches in a row, the last at step {self.progress.step}: {reason}. That is more than "
                f"training.max_skipped={self.training.max_skipped}; lower optimizer.lr and start a new run with "
                "another output_dir="
            )

    def record(self, outcome: str, reason: str) -> str:
        """Append the last batch and its windows to bad_batches.jsonl, and log it unless it ends the run.

        Returns the log line.
        """
        step = self.progress.step
        line = f"step {step} {outcome}: {reason}; its batch is in bad_batches.jsonl"
        if self.is_rank_0:
            samples = self.batches.windows(step - 1)
            numbers = {"loss": finite(self.loss), "grad_norm": finite(self.engine.grad_norm())}
            self.rows.write({"step": step, "outcome": outcome, "reason": reason, **numbers, "samples": samples})
            self.trackers.alert("bad batch", f"{outcome}: {reason}", step)
            if outcome != "ends the run":
                log.warning("%s", line)
        return line


def spike_limit(training: Training, recent_losses: Sequence[float], tokens: int) -> float:
    """Return the summed loss (nats) above which a batch of `tokens` tokens is a spike; infinity if it cannot be one.

    recent_losses: the losses of the newest updates, in nats per token.
    """
    if training.spike_deviations is None or len(recent_losses) < max(2, training.spike_window / 2):
        return math.inf
    limit = (fmean(recent_losses) + training.spike_deviations * stdev(recent_losses)) * tokens
    # rounded to fp32, in which the device compares: it must skip exactly the batches that are logged as spikes
    return torch.tensor(limit, dtype=torch.float32).item()


def spike_text(loss: float, recent_losses: Sequence[float]) -> str:
    """Describe how far a loss is above the recent ones; all in nats per token."""
    mean, deviation = fmean(recent_losses), stdev(recent_losses)
    deviations = (loss - mean) / deviation if deviation else math.inf
    return f"its loss {loss:.2f} is a spike: {deviations:.1f} standard deviations above the mean {mean:.2f}"
