"""The manifest of a checkpoint: its content, its own digest, and its validation."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from depthlm.errors import UserError
from depthlm.files import add_digest, is_intact, read_text
from depthlm.run_directory import MANIFEST, step_of

FORMAT_VERSION = 2


class CheckpointError(UserError):
    """A checkpoint that is incomplete or damaged, or that belongs to another run."""


def _row_with_step(row: dict[str, Any]) -> dict[str, Any]:
    step = row.get("step")
    if row and not (type(step) is int and step >= 0):
        raise ValueError
    return row


# the descriptions are parts of error messages
Count = Annotated[int, Field(ge=0, description="a whole number from 0")]
Steps = Annotated[list[Count], Field(description="a list of steps")]
StepPairs = Annotated[
    list[Annotated[list[Count], Field(min_length=2, max_length=2)]], Field(description="a list of pairs of steps")
]
Row = Annotated[dict[str, Any], AfterValidator(_row_with_step), Field(description="a row with a step")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(kw_only=True)
class Progress:
    """Everything that resuming needs besides the engine's state; the manifest of a checkpoint stores it.

    skipped: the steps whose updates were skipped, in order. overflows: the skipped steps that only showed that the fp16
    loss scale was too large. rewound: [a, b] for each time that the state of step a was restored after step b; steps a
    + 1 to b are in skipped. recent_losses: nats per token of the newest updates, to detect spikes. spikes: the number
    of losses that were spikes, whether their updates were kept, skipped or undone; None as long as no loss could be
    one. row: the row of metrics.jsonl of this step, which a crash may damage in the file while a validation adds to it.
    interval_loss, interval_updates: the sum of the losses (nats per token) and the number of the updates applied in the
    logging interval that has not ended yet.
    """

    step: Count = 0
    tokens: Count = 0
    skipped: Steps = field(default_factory=list)
    overflows: Steps = field(default_factory=list)
    rewound: StepPairs = field(default_factory=list)
    recent_losses: Annotated[list[FiniteFloat], Field(description="a list of numbers")] = field(default_factory=list)
    spikes: Annotated[Count | None, Field(description="a whole number from 0 or null")] = None
    wall_seconds: Annotated[FiniteFloat, Field(ge=0, description="a number from 0")] = 0.0
    wandb_id: Annotated[str | None, Field(description="a text or null")] = None
    row: Row = field(default_factory=dict)
    interval_loss: Annotated[FiniteFloat, Field(description="a number")] = 0.0
    interval_updates: Count = 0

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
        skipped_alone = {step for step in self.skipped if step > applied} - undone - set(self.overflows)
        return len(rewinds) + len(skipped_alone)

    def rewind(self, to: "Progress") -> None:
        """Record that the state of an earlier step, with the progress `to`, was restored after this one."""
        self.recent_losses = to.recent_losses
        self.interval_loss, self.interval_updates = to.interval_loss, to.interval_updates
        for steps in (self.skipped, self.overflows):
            steps[:] = [step for step in steps if step <= to.step]
        self.skipped.extend(range(to.step + 1, self.step + 1))
        self.rewound.append([to.step, self.step])


@validated_dataclass(kw_only=True, config=ConfigDict(strict=True, extra="ignore"))
class Manifest(Progress):
    """A checkpoint: its progress, the ranks, ZeRO stage and expert parallelism that wrote it, and its files.

    step: of the checkpoint. corpus: the digest of the token files. config: the configuration that trained it. files:
    the SHA-256 of each file by its path in the checkpoint.
    """

    step: Count
    world_size: Annotated[int, Field(ge=1, description="a whole number above 0")]
    stage: Annotated[int, Field(ge=0, le=3, description="0, 1, 2 or 3")]
    experts: Annotated[int, Field(ge=1, description="a whole number above 0")]
    corpus: Annotated[str, Field(description="a text")]
    config: Annotated[dict[str, Any], Field(description="an object")]
    files: Annotated[dict[str, Digest], Field(description="an object of file names and their SHA-256")]

    def progress(self) -> Progress:
        """Return the progress of the run at the checkpoint."""
        return Progress(**{part.name: getattr(self, part.name) for part in fields(Progress)})


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with the format version and the SHA-256 of everything else in it."""
    return add_digest({"format_version": FORMAT_VERSION, **manifest})


def parse_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, without looking at the files that it lists.

    Raises CheckpointError if it cannot be read, was changed, has a value of a wrong type, or is of another step.
    """
    try:
        content = json.loads(read_text(path / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no readable {MANIFEST} ({error})") from None
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path}: no readable {MANIFEST} (it has no keys)")
    version = content.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: its {MANIFEST} has format version {version}, and this depthlm reads version {FORMAT_VERSION}; "
            "use the depthlm that wrote it"
        )
    if not is_intact(content):
        raise CheckpointError(f"{path}: {MANIFEST} is not what was saved (its SHA-256 differs)")
    try:
        manifest = Manifest(**content)
    except ValidationError as error:
        problems = {problem["loc"][0]: problem["type"] for problem in error.errors()}
        if missing := [str(name) for name, problem in problems.items() if problem == "missing"]:
            raise CheckpointError(f"{path}: {MANIFEST} lacks {', '.join(missing)}") from None
        name = str(next(iter(problems)))
        wanted = Manifest.__pydantic_fields__[name].description  # type: ignore[attr-defined]
        raise CheckpointError(f"{path}: {name} in {MANIFEST} must be {wanted}") from None
    if step_of(path) not in (None, manifest.step):
        raise CheckpointError(f"{path}: {MANIFEST} is of step {manifest.step}")
    return manifest
