"""The record of a run: its state, its rows of metrics.jsonl, its results, and the losses of a validation."""

import fcntl
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from depthlm.config.keys import flatten
from depthlm.config.saved import of_this_version
from depthlm.files import open_regular, read_json, read_yaml
from depthlm.run_directory import RunDirectory

# bytes
LONGEST_ROW = 2**24
# the states of a run, as printed in the tables of a sweep
STATES = WAITING, RUNNING, STOPPED, FAILED, COMPLETE = "waiting", "running", "stopped", "failed", "complete"
# the name of the error that ends a run whose loss, gradient or state stays non-finite
DIVERGED = "DivergedError"


class Validation(NamedTuple):
    """The mean loss of all validation sets after a step, in nats per token. seconds: the training time so far."""

    step: int
    tokens: float | None
    seconds: float | None
    loss: float


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory. rows: of metrics.jsonl, in order. failure: the error of the last attempt.

    damage: what is wrong with summary.json; None if nothing is, or there is none.
    """

    directory: Path
    state: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    evaluation: dict[str, Any]
    failure: str | None
    damage: str | None = None

    @property
    def step(self) -> int | None:
        """The last logged step."""
        return self.rows[-1]["step"] if self.rows else None

    @property
    def diverged(self) -> bool:
        """Whether non-finite numbers, or too many bad batches in a row, ended the last attempt."""
        return self.state == FAILED and (self.failure or "").startswith(f"{DIVERGED}: ")

    @property
    def loss(self) -> float | None:
        """The last logged training loss, in nats per token."""
        return self.rows[-1]["loss"] if self.rows else None

    @property
    def validations(self) -> list[Validation]:
        """The validations with a finite loss, in order."""
        means = [(row, ValidationLosses.of_row(row).mean) for row in self.rows]
        return [
            Validation(row["step"], finite(row.get("tokens")), finite(row.get("wall_seconds")), loss)
            for row, loss in means
            if loss is not None
        ]

    def number(self, metric: str, at: float = 1.0) -> float | None:
        """Return a number of a complete run, None where it has none or it is not finite. Arguments: as of `result`."""
        try:
            return finite(self.result(metric, at))
        except OverflowError:
            # a damaged file has an integer that no float can hold
            return None

    def result(self, metric: str, at: float = 1.0) -> float | None:
        """Return a measurement of a complete run, infinity if it is not finite; None without a valid one.

        metric: a key of summary.json or evaluation.json, or `training_perplexity`, the perplexity of the mean training
        loss over the last 1% of the steps. at: the share of the steps at which to read it; below 1, only validation
        metrics are available.
        """
        if self.state != COMPLETE or type(self.summary.get("steps")) is not int:
            return None
        if at < 1:
            return self._validation(metric, at)
        if metric == "training_perplexity":
            late = [row["loss"] for row in self.rows if row["step"] > 0.99 * self.summary["steps"]]
            return _perplexity(None if None in late else sum(late) / len(late)) if late else None
        # what training measured does not depend on which runs were evaluated later
        results = self.summary if metric in self.summary else self.evaluation
        value = results.get(metric, False)
        return math.inf if is_not_finite(value) else finite(value)

    def _validation(self, metric: str, at: float) -> float | None:
        quantity = metric.removeprefix("validation_")
        wanted_step = at * self.summary["steps"]
        measured = [row for row in self.rows if ValidationLosses.of_row(row)]
        # a validation too far from the wanted step does not count
        near = [row for row in measured if abs(row["step"] - wanted_step) <= 0.05 * self.summary["steps"]]
        if not near or quantity not in ("loss", "perplexity"):
            return None
        mean = ValidationLosses.of_row(min(near, key=lambda row: abs(row["step"] - wanted_step))).mean
        return _perplexity(mean) if quantity == "perplexity" else math.inf if mean is None else mean


@dataclass(frozen=True)
class ValidationLosses:
    """The mean loss of each validation set by its name, in nats per token; None if it is not finite.

    In a row, a set has the keys `validation/<set>/loss` and `validation/<set>/perplexity`.
    """

    by_set: dict[str, float | None]

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "ValidationLosses":
        """Read the losses of a row; it may have none. A value that is not a finite number counts as None."""
        names = (key.removeprefix("validation/").removesuffix("/loss") for key in row if _is_loss(key))
        return cls({name: finite(row[loss_key(name)]) for name in names})

    def __bool__(self) -> bool:
        return bool(self.by_set)

    @property
    def mean(self) -> float | None:
        """The mean over all sets; None if there is no set, or if one of them has no finite loss."""
        finite = [loss for loss in self.by_set.values() if loss is not None]
        return sum(finite) / len(finite) if finite and len(finite) == len(self.by_set) else None

    def row(self) -> dict[str, float | None]:
        """Return the keys and values for a row."""
        values: dict[str, float | None] = {}
        for name, loss in self.by_set.items():
            values |= {loss_key(name): loss, f"validation/{name}/perplexity": perplexity(loss)}
        return values


def read_run(directory: str | Path) -> RunRecord:
    """Return the record of a run directory, which need not exist; missing or damaged files count as empty."""
    run = RunDirectory(Path(directory))
    summary, failure = read_json(run.summary), read_json(run.failure)
    rows = list(read_metrics(run.metrics))
    if summary:
        state = COMPLETE
    elif is_locked(run.lock):
        state = RUNNING
    elif failure:
        state = FAILED
    else:
        state = STOPPED if rows or run.checkpoint_folders() else WAITING
    evaluation = read_json(run.evaluation)
    if evaluation.get("step", False) != summary.get("steps"):
        # the evaluation belongs to another checkpoint than the last
        evaluation = {}
    error = failure.get("error")
    damage = _damage(summary) if run.summary.exists() else None
    return RunRecord(
        run.path,
        state,
        rows,
        summary,
        evaluation,
        None if error is None else str(error),
        None if damage is None else f"{run.summary}: {damage}",
    )


def with_one_source(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs of a comparison such that each metric is read from the same file of all of them.

    That is evaluation.json, which covers whole validation sets, for the metrics that it has of every complete run;
    summary.json for all others that one of these has; and else evaluation.json. Both keep their texts.
    """
    evaluations = [run.evaluation.keys() for run in runs if run.state == COMPLETE]
    evaluated = frozenset.intersection(*map(frozenset, evaluations)) if evaluations else frozenset()
    measured = {metric for run in runs for metric in run.summary} - evaluated

    def without(results: dict[str, Any], metrics: Set[str]) -> dict[str, Any]:
        return {name: value for name, value in results.items() if name not in metrics or name.endswith("/text")}

    return [
        replace(run, summary=without(run.summary, evaluated), evaluation=without(run.evaluation, measured))
        for run in runs
    ]


def differing_texts(runs: Sequence[RunRecord], every_set: bool = False) -> list[str]:
    """Return the names of the validation sets that have other text in some of these runs than in others.

    every_set: also of those that only some complete runs have.
    """
    counts: Counter[str] = Counter()
    # by set, those of validations while training and of evaluations; runs of earlier versions do not say which it was
    texts: tuple[dict[str, set[str]], ...] = defaultdict(set), defaultdict(set)
    complete = [run for run in runs if run.state == COMPLETE and run.damage is None]
    for run in complete:
        counts.update([*ValidationLosses.of_row(run.summary | run.evaluation).by_set])
        for found, results in zip(texts, (run.summary, run.evaluation), strict=True):
            for name in counts:
                if text := results.get(text_key(name)):
                    found[name].add(text)
    missing = {name for name, count in counts.items() if every_set and count < len(complete)}
    return sorted(missing | {name for found in texts for name, values in found.items() if len(values) > 1})


def _damage(summary: Mapping[str, Any]) -> str | None:
    """Return why these are not the results of a complete run, or None."""
    if type(summary.get("steps")) is not int:
        return "no object with a number of `steps`"
    for name, value in summary.items():
        is_known = finite(value) is not None or is_not_finite(value) or name == "skipped"
        is_text = isinstance(value, str) and name.startswith("validation/") and name.endswith("/text")
        if not is_known and not is_text:
            return f"{name} is not a number"
    return None


def recorded_settings(directory: str | Path) -> dict[str, Any]:
    """Return the settings of a run by their dotted keys; {} where config.yaml is missing or broken.

    A run that was extended has `extended_at`, the steps at which it was complete: each time, its schedule had ended.
    """
    run = RunDirectory(Path(directory))
    settings = flatten(of_this_version(read_yaml(run.config)))
    steps = run.extended_at() if settings else []
    return settings | ({"extended_at": steps} if steps else {})


def read_metrics(
    path: Path, needed: Set[str] = frozenset({"step", "loss"}), lists: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield every valid row of a metrics.jsonl, in order; nothing if there is no file.

    needed: the keys that a row must have, each with a number or null. lists: those that it must have with a list of
    these, as in blocks.jsonl.
    """
    try:
        file = open_regular(path)
    except OSError:
        return
    with file:
        # a longer line is not a row, and its parts are not either
        for line in iter(partial(file.readline, LONGEST_ROW), b""):
            row = row_of(line)
            if row is None or not needed | {*lists} <= row.keys():
                continue
            values = [row[name] for name in needed]
            for name in lists:
                values += row[name] if isinstance(row[name], list) else [row[name], "not a list"]
            if all(value is None or type(value) in (int, float) for value in values):
                yield row


def training_loss(row: Mapping[str, Any]) -> float | None:
    """Return the mean training loss over the logging interval of a row, in nats per token; None if it has none."""
    return finite(row.get("mean_loss"))


def interval_losses(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float | None]]:
    """Return the mean training loss of each row with the tokens at the middle of its updates; None for a gap.

    A row without `interval_updates` begins where the one before it ends.
    """
    points, before = [], 0
    for row in rows:
        step, updates = row["step"], row.get("interval_updates")
        if finite(row.get("tokens")) is None or step <= 0:
            continue
        start = max(0, step - updates) if type(updates) is int else before
        points.append(((start + step) / 2 * row["tokens"] / step, training_loss(row)))
        before = step
    return points


def row_of(line: str | bytes) -> dict[str, Any] | None:
    """Return a line of a file of rows, which has a step; None for a damaged line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def is_locked(lock: Path) -> bool:
    """Return whether a process trains in the directory, on any node that shares this lock."""
    try:
        with open_regular(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def loss_key(name: str) -> str:
    """Return the key of a validation set's loss in a row."""
    return f"validation/{name}/loss"


def text_key(name: str) -> str:
    """Return the key of the text of a validation set: its digest, and how many of its tokens were measured."""
    return f"validation/{name}/text"


def perplexity(loss: float | None) -> float | None:
    """Return exp of a loss in nats per token; None if the loss is None or the result would overflow."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def finite(value: Any) -> float | None:
    """Return a value as JSON can represent it: None if it is not a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if is_number else None


def is_not_finite(value: Any) -> bool:
    """Return whether this is how a file has a number that is not finite; a text or a list is damage."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _perplexity(loss: float | None) -> float:
    """Return the perplexity of a measured loss, infinity if it is not finite."""
    value = perplexity(loss)
    return math.inf if value is None else value


def _is_loss(key: str) -> bool:
    return len(key) > len(loss_key("")) and key.startswith("validation/") and key.endswith("/loss")
