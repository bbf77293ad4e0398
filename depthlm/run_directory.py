"""The paths of a run directory. No other module spells them."""

import re
from pathlib import Path

MANIFEST = "manifest.json"
# folders whose config.yaml files do not belong to runs: code snapshots, and the files of W&B
NO_RUNS = {".slurm", "wandb"}


def is_checkpoint(folder: Path) -> bool:
    """Return whether this is the folder of a complete checkpoint: its manifest is written last."""
    return (folder / MANIFEST).exists()


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None if a user has given it another name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", checkpoint.name)
    return int(match[1]) if match else None


class RunDirectory:
    """The files and folders of a run, whether they exist or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # the resolved configuration; versions, git commit, command and device
        self.config, self.environment = path / "config.yaml", path / "environment.json"
        # what was printed
        self.log = path / "train.log"
        # one object per logged step
        self.metrics = path / "metrics.jsonl"
        # sublayer norms: the sizes of each sublayer's output and gradient, one object per logged step
        self.sublayer_norms = path / "blocks.jsonl"
        # the load of each expert, and the entropy and bias of each router, one object per logged step
        self.experts = path / "experts.jsonl"
        # the batches with a non-finite loss or gradient, or with a spike
        self.bad_batches = path / "bad_batches.jsonl"
        # the results of a complete run: a run is complete when this file exists
        self.summary = path / "summary.json"
        # why the last attempt failed, until the next attempt
        self.failure = path / "failure.json"
        # the measurements of `evaluate`
        self.evaluation = path / "evaluation.json"
        # the picture of the losses
        self.loss_curve = path / "loss.png"
        # the profile of a few steps
        self.trace = path / "profile" / "trace.json"
        # the figures of `inspect`, and the folder for transformers that `export` writes by default
        self.inspection, self.export = path / "inspect", path / "export"
        # what W&B and TensorBoard write
        self.wandb, self.tensorboard = path / "wandb", path / "tensorboard"
        # the process that trains this run holds this file locked
        self.lock = path / ".lock"
        # an empty file that exists since the first checkpoint was complete, also if all checkpoints are removed
        self.saved = path / ".saved"
        self.checkpoints = path / "checkpoints"
        # the name of the newest checkpoint, for people and scripts; resuming reads the manifests
        self.latest = self.checkpoints / "latest"

    @classmethod
    def of(cls, output_dir: str | Path | None) -> "RunDirectory":
        """Return the run directory of a configuration's `output_dir`."""
        return cls(Path(output_dir or ""))

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
            self.lock,
            self.saved,
            self.evaluation,
            self.loss_curve,
            self.trace.parent,
            self.wandb,
            self.tensorboard,
            *(self.path / name for name in ("tokenizer.json", "tokenizer_config.json")),
        )

    def earlier_summary(self, step: int) -> Path:
        """Return the summary of a run that was complete at this step and has been extended since."""
        return self.path / f"summary-step-{step:08d}.json"

    def lost_summary(self, step: int) -> Path:
        """Return the summary of a run that was complete at this step, whose steps before it were trained again."""
        return self.path / f"summary-lost-{step:08d}.json"

    def extended_at(self) -> list[int]:
        """Return the steps at which the run was complete before it was extended, ascending."""
        names = (path.stem.rpartition("-")[2] for path in self.path.glob("summary-step-*.json"))
        return sorted(int(step) for step in names if step.isdecimal())

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_folders(self) -> list[Path]:
        """Return the folders of all checkpoints, the newest first, valid or not, without folders that a user named."""
        steps = {path: step for path in self.checkpoints.glob("step-*") if (step := step_of(path)) is not None}
        folders = [path for path, step in steps.items() if path.name == self.checkpoint(step).name]
        return sorted(folders, key=lambda path: steps[path], reverse=True)

    def staging(self, step: int) -> Path:
        """Return the directory in which the checkpoint of a step is written before it is renamed."""
        return self.checkpoints / f".saving-step-{step:08d}"

    def leftovers(self) -> list[Path]:
        """Return the staging directories of checkpoints that were being written when a process ended."""
        return [*self.checkpoints.glob(".saving-*")]
