"""The trainer of one run: reads batches, updates the weights, logs metrics, saves checkpoints and validates."""

import dataclasses
import logging
import math
from functools import partial
from typing import Any

import torch

from depthlm.data import loader
from depthlm.distributed.process_group import on_any_rank, on_rank_0
from depthlm.distributed.signals import STOPPED, StopRequest
from depthlm.machine import environment
from depthlm.model.layer import UNOBSERVED
from depthlm.model.parameters import seed_for
from depthlm.run_directory import RunDirectory
from depthlm.runs.directory import Claim, DirectoryLostError
from depthlm.runs.manifest import Progress
from depthlm.runs.records import ValidationLosses, finite, read_metrics
from depthlm.runs.trackers import Trackers, start_trackers
from depthlm.training.checkpoint.saving import Saver
from depthlm.training.engine import Engine
from depthlm.training.graphs import make_graphs
from depthlm.training.monitoring.describe import Cost, show_next_commands, summary_of, write_results
from depthlm.training.monitoring.display import Bar, row_text, validation_lines
from depthlm.training.monitoring.metrics import (
    FIRST_PROFILED,
    MetricsFile,
    RoutingMeter,
    Stopwatch,
    SublayerNormMeter,
    peak_memory_gib,
    start_profiler,
)
from depthlm.training.nonfinite import BadBatches, DivergedError, spike_limit
from depthlm.training.plan import Due, is_multiple, learning_rate
from depthlm.training.setup import Setup
from depthlm.training.step import Step, dropout_seeds, train_step
from depthlm.training.validation import ValidationStopped, log_sample, mechanism_diagnostics, validate

log = logging.getLogger("depthlm")

COMPLETE = 0


class Trainer:
    """A run in its locked directory. `fit` trains it; its methods follow in the order in which a step calls them.

    Most methods are collective, so every rank calls each of them; only `mfu` may be called on one rank.
    """

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        cost: Cost,
        progress: Progress,
        saver: Saver,
        request: StopRequest,
        claim: Claim,
    ) -> None:
        self.config, self.training, self.plan = setup.config, setup.config.training, setup.plan
        self.corpus, self.batches = setup.corpus, setup.batches
        self.activity, self.request, self.claim = setup.activity, request, claim
        self.engine, self.device, self.cost, self.progress, self.saver = engine, engine.device, cost, progress, saver
        self.is_rank_0 = setup.ranks.rank == 0
        self.paths = RunDirectory.of(setup.config.output_dir)
        self.peak_flops = environment.peak_flops(environment.device_name(self.device.type), self.config.precision.name)
        self.metrics = MetricsFile(self.paths.metrics if self.is_rank_0 else None, progress.step, progress.row)
        # the decisions of all ranks depend on its newest row
        self.metrics.last = on_rank_0(lambda: self.metrics.last)
        norms = self.paths.sublayer_norms
        has_norms = self.is_rank_0 and (self.training.log_blocks_every is not None or norms.exists())
        self.sublayer_norms = MetricsFile(norms if has_norms else None, progress.step)
        self.routing: RoutingMeter | None = None
        if engine.model.mixtures():
            rows = MetricsFile(self.paths.experts if self.is_rank_0 else None, progress.step)
            self.routing = RoutingMeter(engine.model, self.device, rows)
        self.stopwatch, self.logged_at = Stopwatch(progress.wall_seconds), progress.step
        self.data_wait = Stopwatch()
        self.profiler = start_profiler(self.paths.path) if self.training.profile and self.is_rank_0 else None
        self.trackers = Trackers([])
        if self.is_rank_0:
            settings, path = dataclasses.asdict(self.config), self.paths.path
            self.trackers = start_trackers(
                self.config.tracker, path, settings, progress.wandb_id, resumed_at=progress.step
            )
        self.bad_batches = BadBatches(setup, engine, progress, saver, self.trackers)
        workers, pinned = self.config.data.num_workers, self.device.type == "cuda"
        self.graphs = make_graphs(setup.config, setup.plan, engine)
        self.loader = loader(self.batches, progress.step, self.plan.last_step, num_workers=workers, pin_memory=pinned)

    def fit(self) -> int:
        """Train to the plan's last step, and write the results of a complete run. Returns the exit code.

        A signal ends training after the step, with the state saved. Raises DivergedError if bad batches end the run,
        NotSavedError if the last checkpoint could not be written, and DirectoryLostError if the run directory is gone.
        """
        progress, summary = self.progress, None
        try:
            stopped, summary = self.train_and_complete()
        except DivergedError:
            if self.saver.writing is not None:
                self.saver.finish()
            raise
        finally:
            self.activity.mark("uploading to the trackers", progress.step, limited=False)
            self.trackers.close(summary)
            # otherwise its hooks on the weights keep it in memory during the next point of a sweep
            self.engine.destroy()
            self.graphs = None
        if stopped:
            log.info("stopped by a signal after step %d; the same command resumes from there", progress.step)
            return STOPPED
        if progress.step < self.plan.max_steps:
            log.info("stopped after step %d of %d (training.stop_after)", progress.step, self.plan.max_steps)
        return COMPLETE

    def train_and_complete(self) -> tuple[bool, dict[str, Any] | None]:
        """Train, and complete a run at its end. Returns whether a signal stopped it, and the summary on rank 0."""
        try:
            stopped = self.train_steps()
            self.activity.mark("finishing", self.progress.step)
            at_end = not stopped and self.progress.step == self.plan.max_steps
            return stopped, self.complete() if at_end else None
        except ValidationStopped:
            self.check_directory()
            self.save(last=True)
            return True, None

    def train_steps(self) -> bool:
        """Train to the plan's last step and save a checkpoint. Returns whether a signal stopped it early."""
        progress = self.progress
        self.request.training = True
        self.make_up_validation()
        rank, tokens = torch.distributed.get_rank(), self.plan.tokens_per_step
        with Bar(progress.step, self.plan.last_step, rank, tokens, self.mfu) as bar:
            self.stopwatch.start()
            while progress.step < self.plan.last_step:
                step = self.take_step()
                self.bad_batches.handle(step)
                due = self.agree_on_what_is_due()
                self.maybe_log(step, due, bar)
                self.stopwatch.pause()
                seconds = self.stopwatch.total - progress.wall_seconds
                bar.step(progress.step, progress.tokens, finite(step.nll / tokens), seconds)
                progress.wall_seconds = self.stopwatch.total
                self.maybe_save(due)
                self.maybe_validate(due)
                if self.metrics.last.get("step") == progress.step:
                    self.trackers.write(self.metrics.last)
                self.maybe_evaluate()
                if self.profiler is not None:
                    self.profiler.step()
                if due.stop:
                    break
                self.stopwatch.start()
        if self.profiler is not None:
            self.profiler.stop()
            if self.profiler.step_num < FIRST_PROFILED:
                log.warning("no trace: profiling begins at step %d of a process", FIRST_PROFILED)
        return progress.step < self.plan.last_step

    def make_up_validation(self) -> None:
        """Validate and evaluate if the previous process ended between a checkpoint and the end of either."""
        step, row = self.progress.step, self.metrics.last
        if row.get("step") == step and self.validation_due(step) and not ValidationLosses.of_row(row):
            self.validate()
            self.trackers.write(self.metrics.last)
        self.maybe_evaluate()

    def take_step(self) -> Step:
        """Train on the next batch, and count it."""
        config, progress, engine = self.config, self.progress, self.engine
        mark = partial(self.activity.mark, step=progress.step + 1)
        mark("reading the batch")
        self.data_wait.start()
        batch = next(self.loader)
        self.data_wait.pause()
        if self.graphs is not None:
            self.graphs.make_room(batch)
        batch = batch.to(self.device, non_blocking=True)
        lr = learning_rate(config, self.plan, progress.updates)
        engine.set_learning_rate(lr)
        # seeding every step makes random draws depend on the step alone, so resuming needs no generator state
        torch.manual_seed(seed_for(config.seed, f"step {progress.step}, rank {torch.distributed.get_rank()}"))
        loss_scale = engine.loss_scale
        limit = spike_limit(self.training, progress.recent_losses, self.plan.tokens_per_step)
        highest = limit if self.training.on_spike == "skip" else math.inf
        every = self.training.log_blocks_every
        norms_due = every is not None and (progress.step == 0 or is_multiple(progress.step + 1, every))
        meter = SublayerNormMeter(config.model.loops * config.size.num_layers, self.device) if norms_due else None
        graphs = self.graphs if meter is None else None
        if graphs is None:
            self.release_graphs()
        nll = train_step(
            engine,
            batch,
            self.plan,
            self.training.z_loss,
            highest=highest,
            mark=mark,
            observer=meter or UNOBSERVED,
            routing=self.routing,
            seeds=dropout_seeds(config, progress.step, self.batches),
            graphs=graphs,
        )
        progress.step += 1
        progress.tokens += self.plan.tokens_per_step
        if meter is not None:
            self.sublayer_norms.write({"step": progress.step, **meter.row(loss_scale)})
        mark("synchronizing ranks")
        return Step(nll, lr, loss_scale, limit)

    def release_graphs(self) -> None:
        """Free the memory of the graphs for what runs without them; the next step captures again, in half a second."""
        if self.graphs is not None:
            self.graphs.release()

    def agree_on_what_is_due(self) -> Due:
        """Return the actions due after a step: a signal, a clock or a written file on one rank counts for all."""
        step = self.progress.step
        flags = (self.request.name is not None, self.saver.due(), self.saver.busy(), not self.claim.intact())
        stop, by_the_clock, busy, lost = on_any_rank(flags, self.device)
        if lost:
            raise DirectoryLostError(self.paths.path)
        last = stop or step == self.plan.last_step
        saved, validate = is_multiple(step, self.training.checkpoint_every), self.validation_due(step)
        interval_ends = saved or validate or step == 1 or is_multiple(step, self.training.log_every)
        return Due(last, stop, last or by_the_clock or saved, validate, interval_ends, written=not busy)

    def check_directory(self) -> None:
        """Raise DirectoryLostError if the run directory is gone. Called after what takes long, before it is written."""
        (lost,) = on_any_rank((not self.claim.intact(),), self.device)
        if lost:
            raise DirectoryLostError(self.paths.path)

    def validation_due(self, step: int) -> bool:
        """Return whether a validation follows this step; the last step of the run always has one."""
        return is_multiple(step, self.training.validate_every) or step == self.plan.max_steps

    def maybe_log(self, step: Step, due: Due, bar: Bar) -> None:
        """Write a row of metrics if a logging interval ends, or if a signal or the clock causes a checkpoint."""
        number = self.progress.step
        if not (due.save or due.interval_ends):
            return
        steps, seconds, self.logged_at = number - self.logged_at, self.stopwatch.take_lap(), number
        tokens_per_second = steps / seconds * self.plan.tokens_per_step
        # the share of the samples and the epochs of each source of a mixture
        seen = self.batches.count_seen(number) if len(self.corpus.train) > 1 else {}
        row = {
            "step": number,
            "tokens": self.progress.tokens,
            "loss": finite(step.nll / self.plan.tokens_per_step),
            "mean_loss": self.progress.mean_loss,
            "interval_updates": self.progress.interval_updates,
            "learning_rate": step.learning_rate,
            "grad_norm": finite(self.engine.grad_norm()),
            "tokens_per_second": tokens_per_second,
            "world_size": self.plan.world_size,
            "mfu": self.mfu(tokens_per_second),
            "data_seconds": self.data_wait.take_lap(),
            "peak_memory_gib": peak_memory_gib(self.device),
            **{f"data/{name}/share": share for name, (share, _) in seen.items()},
            **{f"data/{name}/epochs": epochs for name, (_, epochs) in seen.items()},
            "loss_scale": step.loss_scale,
            **(self.routing.metrics() if self.routing is not None else {}),
        }
        bar.memory = row["peak_memory_gib"]
        log.info("%s", row_text(row, self.plan.max_steps, steps, seconds))
        self.metrics.write(row)
        if self.routing is not None:
            self.routing.write(number)
        if due.interval_ends:
            self.progress.begin_interval()

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilization of a rank; None if the peak FLOP/s of the device are unknown."""
        flops_per_second = tokens_per_second * self.cost.flops_per_token / self.plan.world_size
        return flops_per_second / self.peak_flops if self.peak_flops else None

    def maybe_save(self, due: Due) -> None:
        """Complete the checkpoint that is being written, and save one if it is due."""
        if self.saver.writing is not None and due.written:
            self.saver.finish()
        # save before validation, so that a failure there loses no training
        if due.save:
            self.save(last=due.last)

    def save(self, last: bool) -> None:
        """Save a checkpoint of the last step, if its state is finite. last: no other one of this process follows.

        Raises DivergedError if the state is not finite and cannot be rewound.
        """
        self.activity.mark("saving", self.progress.step)
        self.bad_batches.check_state()
        self.progress.wandb_id, self.progress.row = self.trackers.id, self.metrics.last
        self.saver.save(dataclasses.asdict(self.progress), last=last)

    def maybe_validate(self, due: Due) -> None:
        """Validate if it is due. Raises ValidationStopped for a signal."""
        if due.validate:
            self.activity.mark("validating", self.progress.step)
            self.validate()

    def validate(self) -> None:
        """Add the validation losses and the mechanism's diagnostics to the newest row of metrics."""
        self.release_graphs()
        losses = self.validation_losses()
        diagnostics = mechanism_diagnostics(self.config, self.plan, self.corpus, self.engine)
        self.check_directory()
        self.metrics.amend(losses.row() | {"wall_seconds": self.progress.wall_seconds} | diagnostics)
        for line in validation_lines(losses, diagnostics):
            log.info("%s", line)

    def maybe_evaluate(self) -> None:
        """Evaluate the last step's checkpoint if it is due. Raises ValidationStopped for a signal."""
        step, row, every = self.progress.step, self.metrics.last, self.config.evaluation.every
        due = is_multiple(step, every) or (every is not None and step == self.plan.max_steps)
        if not due or row.get("step") != step:
            return
        from depthlm.evaluation.online import evaluate_checkpoint, missing_results

        if not missing_results(self.config, row):
            return
        if self.saver.writing is not None:
            self.saver.finish()
        self.activity.mark("evaluating", step)
        self.release_graphs()
        stopped = evaluate_checkpoint(
            self.config,
            step,
            row,
            self.corpus.tokenizer,
            self.metrics.amend,
            self.activity,
            lambda: self.request.name is not None,
            self.device,
        )
        if results := {key: value for key, value in self.metrics.last.items() if row.get(key) != value}:
            self.trackers.write({"step": step} | results)
        self.check_directory()
        if stopped:
            raise ValidationStopped

    def validation_losses(self) -> ValidationLosses:
        """Measure the loss of each validation set."""
        return validate(self.config, self.plan, self.corpus, self.engine, self.activity, self.request)

    def complete(self) -> dict[str, Any] | None:
        """Write the results of the complete run: summary.json, the loss curve, a sample. Returns the summary on rank 0.

        The losses are those in the last row of metrics.jsonl; if it has none, they are measured again.
        """
        progress, corpus, last, summary = self.progress, self.corpus, self.metrics.last, None
        losses = ValidationLosses.of_row(last) if last.get("step") == self.plan.max_steps else None
        losses = losses or self.validation_losses()
        self.check_directory()
        peak = peak_memory_gib(self.device)
        if self.is_rank_0:
            summary = summary_of(
                progress,
                losses,
                corpus.validation_texts(self.config.training.validation_tokens),
                last,
                self.cost,
                unigram_entropy=corpus.unigram_entropy,
                rows=read_metrics(self.paths.metrics),
                peak_memory_gib=peak,
            )
            write_results(self.paths.path, summary)
            if self.config.evaluation.every is not None:
                from depthlm.evaluation.online import record_results

                record_results(self.config, last)
        log_sample(self.config, self.engine, corpus)
        if self.is_rank_0:
            show_next_commands(self.config)
        return summary
