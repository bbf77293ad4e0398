"""The progress of a run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Everything that resuming needs besides the engine's state; the manifest of a checkpoint stores it.

    skipped: the steps whose updates were skipped, in order. overflows: the skipped steps that only showed that the
    fp16 loss scale was too large. rewound: [a, b] for each time that the state of step a was restored after step b;
    steps a + 1 to b are in skipped. recent_losses: nats per token of the newest updates, to detect spikes. row: the row
    of metrics.jsonl of this step, which a crash may damage in the file while a validation adds to it. interval_loss,
    interval_updates: the sum of the losses (nats per token) and the number of the updates applied in the logging
    interval that has not ended yet.
    """

    step: int = 0
    tokens: int = 0
    skipped: list[int] = field(default_factory=list)
    overflows: list[int] = field(default_factory=list)
    rewound: list[list[int]] = field(default_factory=list)
    recent_losses: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0
    wandb_id: str | None = None
    row: dict[str, Any] = field(default_factory=dict)
    interval_loss: float = 0.0
    interval_updates: int = 0

    @property
    def updates(self) -> int:
        """The number of updates applied so far."""
        return self.step - len(self.skipped)

    @property
    def tokens_per_second(self) -> float:
        """The mean speed of the training steps of the whole run."""
        return self.tokens / self.wall_seconds

    @property
    def mean_loss(self) -> float | None:
        """The mean loss of the updates in the current logging interval, in nats per token; None if there are none."""
        return self.interval_loss / self.interval_updates if self.interval_updates else None

    def count_loss(self, loss: float) -> None:
        """Add the loss of an applied update, in nats per token, to the current logging interval."""
        self.interval_loss += loss
        self.interval_updates += 1

    def begin_interval(self) -> None:
        """Begin a new logging interval."""
        self.interval_loss, self.interval_updates = 0.0, 0

    def bad_in_a_row(self) -> int:
        """Return the number of bad batches since the newest update that was kept; each rewind counts as one."""
        skipped, applied = set(self.skipped), self.step
        while applied in skipped:
            applied -= 1
        rewinds = [(start, end) for start, end in self.rewound if end > applied]
        undone = {step for start, end in rewinds for step in range(start + 1, end + 1)}
        alone = {step for step in self.skipped if step > applied} - undone - set(self.overflows)
        return len(rewinds) + len(alone)

    def rewind(self, to: "Progress") -> None:
        """Record that the state of an earlier step, with the progress `to`, was restored after this one."""
        self.recent_losses = to.recent_losses
        self.interval_loss, self.interval_updates = to.interval_loss, to.interval_updates
        for steps in (self.skipped, self.overflows):
            steps[:] = [step for step in steps if step <= to.step]
        self.skipped.extend(range(to.step + 1, self.step + 1))
        self.rewound.append([to.step, self.step])
