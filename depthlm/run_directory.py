"""The paths of a run directory. No other module spells them."""

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
# how the name of a folder begins that is being removed
REMOVING = ".removing-"


def is_checkpoint(folder: Path) -> bool:
    """Return whether this is the folder of a complete checkpoint: its manifest is written last."""
    return (folder / MANIFEST).exists()


def removing(folder: Path) -> Path:
    """Where a folder is moved before its content is deleted; another path at each call."""
    return folder.with_name(f"{REMOVING}{folder.name}-{secrets.token_hex(8)}")


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None if a user has given it another name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", checkpoint.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class RunDirectory:
    """The files and folders of a run, whether they exist or not."""

    path: Path

    @classmethod
    def of(cls, output_dir: str | Path | None) -> "RunDirectory":
        """The run directory of a configuration's `output_dir`."""
        return cls(Path(output_dir or ""))

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, git commit, command and device."""
        return self.path / "environment.json"

    @property
    def log(self) -> Path:
        """What was printed."""
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        """One object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def sublayer_norms(self) -> Path:
        """The sizes of each sublayer's output and gradient, one object per logged step."""
        return self.path / "blocks.jsonl"

    @property
    def experts(self) -> Path:
        """The load of each expert, and the entropy and bias of each router, one object per logged step."""
        return self.path / "experts.jsonl"

    @property
    def bad_batches(self) -> Path:
        """The batches with a non-finite loss or gradient, or with a spike."""
        return self.path / "bad_batches.jsonl"

    @property
    def row_files(self) -> tuple[Path, ...]:
        """The files to which a run appends a row at a time."""
        return self.metrics, self.bad_batches, self.sublayer_norms, self.experts

    @property
    def contents(self) -> tuple[Path, ...]:
        """The files of which a directory with a run has at least one."""
        return self.config, self.checkpoints, self.metrics, self.summary

    @property
    def written(self) -> tuple[Path, ...]:
        """All files and folders that training writes or replaces."""
        return (
            *self.contents,
            *self.row_files,
            self.environment,
            self.log,
            self.failure,
            self.evaluation,
            self.loss_curve,
            self.trace.parent,
            self.wandb,
            self.tensorboard,
            *(self.path / name for name in ("tokenizer.json", "tokenizer_config.json")),
        )

    @property
    def summary(self) -> Path:
        """The results of a complete run. A run is complete when this file exists."""
        return self.path / "summary.json"

    def earlier_summary(self, step: int) -> Path:
        """The summary of a run that was complete at this step and has been extended since."""
        return self.path / f"summary-step-{step:08d}.json"

    @property
    def failure(self) -> Path:
        """Why the last attempt failed, until the next one."""
        return self.path / "failure.json"

    @property
    def evaluation(self) -> Path:
        """The measurements of `evaluate`."""
        return self.path / "evaluation.json"

    @property
    def loss_curve(self) -> Path:
        """The picture of the losses."""
        return self.path / "loss.png"

    @property
    def trace(self) -> Path:
        """The profile of a few steps."""
        return self.path / "profile" / "trace.json"

    @property
    def inspection(self) -> Path:
        """The folder of the pictures of `inspect`."""
        return self.path / "inspect"

    @property
    def export(self) -> Path:
        """The folder for transformers that `export` writes, unless it is given another."""
        return self.path / "export"

    @property
    def wandb(self) -> Path:
        """The folder that W&B writes."""
        return self.path / "wandb"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def lock(self) -> Path:
        """The file that the one process that trains this run holds locked."""
        return self.path / ".lock"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def saved(self) -> Path:
        """An empty file that exists since the first checkpoint was complete, also if all checkpoints are removed."""
        return self.path / ".saved"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_folders(self) -> list[Path]:
        """The folders of all checkpoints, the newest first, valid or not. Folders with other names are the user's."""
        steps = {path: step_of(path) for path in self.checkpoints.glob("step-*")}
        own = [path for path, step in steps.items() if step is not None and path.name == self.checkpoint(step).name]
        return sorted(own, key=lambda path: step_of(path) or 0, reverse=True)

    @property
    def latest(self) -> Path:
        """The name of the newest checkpoint, for people and scripts; resuming reads the manifests."""
        return self.checkpoints / "latest"

    def staging(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it is renamed."""
        return self.checkpoints / f".saving-step-{step:08d}"

    def leftovers(self) -> list[Path]:
        """Staging directories of checkpoints that were being written when a process ended."""
        return [*self.checkpoints.glob(".saving-*")]
