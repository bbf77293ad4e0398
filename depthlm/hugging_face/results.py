"""What a run recorded about the weights of one of its checkpoints: losses, and where it ran."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from depthlm.files import read_json
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import RunRecord, training_loss
from depthlm.runs.validation_losses import ValidationLosses, finite


class Results(NamedTuple):
    """The losses of the weights of a checkpoint, in nats per token.

    step: of the checkpoint. is_complete: whether the run ended with it. validation: of this step, or the newest before
    it. measured_at: the step of the validation; None without one. is_evaluation: whether `evaluate` measured it, which
    reads whole validation sets. bits_per_byte: by validation set, from `evaluate`. training: the mean loss over the
    last logging interval.
    """

    step: int
    is_complete: bool
    validation: ValidationLosses
    measured_at: int | None
    is_evaluation: bool
    bits_per_byte: Mapping[str, float | None]
    training: float | None


def results_at(record: RunRecord, step: int) -> Results:
    """Return what a run recorded about the weights after a step."""
    is_complete = record.summary.get("steps") == step
    logged = [row for row in record.rows if row["step"] <= step]
    training = training_loss(logged[-1]) if logged else None
    measured = next((row for row in reversed(logged) if ValidationLosses.of_row(row)), None)
    validation, at = ValidationLosses.of_row(measured or {}), None if measured is None else measured["step"]
    evaluated = ValidationLosses.of_row(record.evaluation if is_complete else {})
    # `evaluate` may have measured other sets only
    if not evaluated or not validation.by_set.keys() <= evaluated.by_set.keys():
        return Results(step, is_complete, validation, at, False, {}, training)
    bits = {name: finite(record.evaluation.get(f"validation/{name}/bits_per_byte")) for name in evaluated.by_set}
    return Results(step, is_complete, evaluated, step, True, bits, training)


def environment_of(run: Path) -> dict[str, Any]:
    """Return the content of a run's environment.json; {} where it is missing or damaged."""
    return read_json(RunDirectory(run).environment)


def version_of(environment: Mapping[str, Any]) -> str:
    """Return the version of depthlm that trained a run, and its commit; empty where they are not recorded."""
    versions, git = environment.get("versions"), environment.get("git")
    version = versions.get("depthlm") if isinstance(versions, dict) else None
    commit = git.get("commit") if isinstance(git, dict) else None
    if not version:
        return ""
    changed = " with uncommitted changes" if isinstance(git, dict) and git.get("changed") else ""
    return f"depthlm {version}" + (f" (commit {str(commit)[:12]}{changed})" if commit else "")
