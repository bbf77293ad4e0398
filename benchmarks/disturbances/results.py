"""What a run has written so far, and the results that must not depend on disturbances."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

NAMES = (
    "step", "tokens", "loss", "mean_loss", "learning_rate", "grad_norm", "validation/stdlib/loss",
    "validation/local/loss",
)  # fmt: skip


def newest_step(directory: Path) -> int:
    """Return the step of the newest complete row in metrics.jsonl, or 0 if there is none."""
    with suppress(OSError):
        for row in reversed((directory / "metrics.jsonl").read_text().splitlines()):
            with suppress(ValueError):
                return int(json.loads(row)["step"])
    return 0


def is_saving(directory: Path, since: float = 0.0) -> bool:
    """Return whether a checkpoint is being written. since: Unix time; folders that are older do not count."""
    for path in (directory / "checkpoints").glob(".saving-*"):
        with suppress(FileNotFoundError):
            if path.stat().st_ctime >= since:
                return True
    return False


def outcome(directory: Path) -> dict[str, Any]:
    """Return the results that must not depend on disturbances: loss curve, validation loss and weights."""
    rows = [json.loads(row) for row in (directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / "summary.json").read_text())
    newest = (directory / "checkpoints/latest").read_text().strip()
    return {
        "curve": [[row.get(name) for name in NAMES] for row in rows],
        "validation_loss": summary["validation_loss"],
        "weights": load_file(directory / "checkpoints" / newest / "model.safetensors"),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two results are equal, bit for bit."""
    weights = one["weights"].keys() == other["weights"].keys() and all(
        torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"]
    )
    return weights and one["curve"] == other["curve"] and one["validation_loss"] == other["validation_loss"]
