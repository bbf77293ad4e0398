"""What a run leaves in its directory, read for comparisons."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from depthlm.runs.records import read_metrics

# the types of the fixtures small_run, and of train_run and trained
Overrides = Callable[..., list[str]]
TrainRun = Callable[..., Path]
CURVE = ("step", "tokens", "loss", "learning_rate", "grad_norm", "mean_loss")


def curve(directory: Path) -> list[tuple[Any, ...]]:
    """Return the values of every logged step that do not depend on the clock."""
    return [tuple(row[name] for name in CURVE) for row in read_metrics(directory / "metrics.jsonl")]


def checkpoint(directory: Path, step: int | None = None) -> Path:
    """Return the folder of the checkpoint of a step, or of the newest."""
    return max(directory.glob(f"checkpoints/step-{'*' if step is None else f'{step:08d}'}"))


def manifest(directory: Path, step: int | None = None) -> dict[str, Any]:
    """Return the manifest of the checkpoint of a step, or of the newest."""
    return json.loads((checkpoint(directory, step) / "manifest.json").read_text())


def weights(directory: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of the checkpoint of a step, or of the newest."""
    return load_file(checkpoint(directory, step) / "model.safetensors")


def states(directory: Path, step: int | None = None) -> dict[str, Any]:
    """Return every tensor and number of DeepSpeed's part of a checkpoint, of all ranks; of the newest by default."""
    files = sorted((checkpoint(directory, step) / "deepspeed").glob("*.pt"))
    loaded = {file.name: torch.load(file, weights_only=False) for file in files}
    return {name: value for name, value in tensors(loaded).items() if isinstance(value, (torch.Tensor, float, int))}


def tensors(value: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf of a nested state by its path."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)  # type: ignore[assignment]
    else:
        return {path: value}
    return {name: leaf for key, inner in items for name, leaf in tensors(inner, f"{path}/{key}").items()}


def bad_batches(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of bad_batches.jsonl."""
    return list(read_metrics(directory / "bad_batches.jsonl"))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two sets of tensors and numbers are equal bit for bit."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))] == []


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that the curves, weights and states of two runs are equal bit for bit."""
    assert curve(one) == curve(other)
    assert_same(weights(one), weights(other))
    assert_same(states(one), states(other))


def train_three(train_run: TrainRun, *overrides: str, stops: tuple[int, ...]) -> tuple[Path, Path, Path]:
    """Train on one rank, on two, and on two with stops; the last two must be equal. Returns their directories."""
    one, two = train_run(*overrides, name="one"), train_run(*overrides, ranks=2, name="two")
    resumed = train_run(*overrides, ranks=2, name="resumed", stops=stops)
    assert_same_run(two, resumed)
    return one, two, resumed


def losses(directory: Path) -> list[float]:
    """Return the loss of every logged step."""
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]
