"""What a run leaves in its directory, read for comparisons."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


def assert_close(one: Path, other: Path, tolerance: float, weight_tolerance: float) -> None:
    """Assert that losses, gradient norms and final weights of two runs are equal within rounding."""
    rows, expected = ([row[2:] for row in curve(path)] for path in (one, other))
    assert len(rows) == len(expected)
    for (loss, _, norm, _), (expected_loss, _, expected_norm, _) in zip(rows, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=10 * tolerance)
    first, second = weights(one), weights(other)
    assert {name: weight.shape for name, weight in first.items()} == {n: weight.shape for n, weight in second.items()}
    for name, weight in second.items():
        assert torch.dist(first[name].float(), weight.float()) <= weight_tolerance * weight.float().norm(), name


def train_three(train_run: TrainRun, *overrides: str, of_one: tuple[str, ...] = ()) -> tuple[Path, Path, Path]:
    """Train six steps on one rank, on two, and on two with a stop; the last two must be equal.

    of_one: further overrides of the single rank. Returns the directories.
    """
    given = ("training.max_steps=6", "training.checkpoint_every=100", *overrides)
    one, two = train_run(*given, *of_one, name="one"), train_run(*given, ranks=2, name="two")
    resumed = train_run(*given, ranks=2, name="resumed", stops=(3, 6))
    assert_same_run(two, resumed)
    return one, two, resumed


def losses(directory: Path) -> list[float]:
    """Return the loss of every logged step."""
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]
