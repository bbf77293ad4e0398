"""The record of a run: its state, its rows of metrics.jsonl, its results, and the losses of a validation."""

import fcntl
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from depthlm.config.keys import flatten
from depthlm.files import open_regular, read_json, read_yaml
from depthlm.run_directory import RunDirectory

# bytes
LONGEST_ROW = 2**24
# the states of a run, as printed in the tables of a sweep
STATES = WAITING, RUNNING, STOPPED, FAILED, COMPLETE = "waiting", "running", "stopped", "failed", "complete"


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory. rows: of metrics.jsonl, in order. failure: the error of the last attempt."""

    directory: Path
    state: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    evaluation: dict[str, Any]
    failure: str | None

    @property
    def step(self) -> int | None:
        """The last logged step."""
        return self.rows[-1]["step"] if self.rows else None

    @property
    def loss(self) -> float | None:
        """The last logged training loss, in nats per token."""
        return self.rows[-1]["loss"] if self.rows else None

    def number(self, metric: str, at: float = 1.0) -> float | None:
        """Return a number of a complete run, otherwise None.

        metric: a key of summary.json or evaluation.json, or `training_perplexity`, the perplexity of the mean training
        loss over the last 1% of the steps. at: the share of the steps at which to read it; below 1, only validation
        metrics are available.
        """
        if self.state != COMPLETE or not isinstance(self.summary.get("steps"), int):
            return None
        if at < 1:
            return self._validation(metric, at)
        if metric == "training_perplexity":
            late = [row["loss"] for row in self.rows if row["step"] > 0.99 * self.summary["steps"]]
            return perplexity(finite(sum(late) / len(late))) if late and None not in late else None
        # prefer evaluation: it covers whole validation sets, training possibly only a part
        value = self.evaluation.get(metric, self.summary.get(metric))
        return finite(value)

    def _validation(self, metric: str, at: float) -> float | None:
        quantity = metric.removeprefix("validation_")
        wanted_step = at * self.summary["steps"]
        measured = [row for row in self.rows if ValidationLosses.of_row(row)]
        # a validation too far from the wanted step does not count
        near = [row for row in measured if abs(row["step"] - wanted_step) <= 0.05 * self.summary["steps"]]
        if not near or quantity not in ("loss", "perplexity"):
            return None
        mean = ValidationLosses.of_row(min(near, key=lambda row: abs(row["step"] - wanted_step))).mean
        return perplexity(mean) if quantity == "perplexity" else mean


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
    if "step" in evaluation and evaluation["step"] != summary.get("steps"):
        # the evaluation belongs to an earlier checkpoint than the last
        evaluation = {}
    error = failure.get("error")
    return RunRecord(run.path, state, rows, summary, evaluation, None if error is None else str(error))


def recorded_settings(directory: str | Path) -> dict[str, Any]:
    """Return the settings of a run by their dotted keys; {} where config.yaml is missing or broken."""
    return flatten(read_yaml(RunDirectory(Path(directory)).config))


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
        yield from _rows(file, needed, lists)


def _rows(file: BinaryIO, needed: Set[str], lists: Collection[str]) -> Iterator[dict[str, Any]]:
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
    """Return the mean training loss of each logging interval with the tokens at its middle; None for a gap.

    So that all points are means over about as many steps, the first step joins the interval after it, and a last
    interval that is shorter than the others joins the one before it. A row inside an interval, from a stop by a signal
    or the clock, is left out: the mean of the interval contains its steps.
    """
    logged = [row for row in rows if finite(row.get("tokens")) is not None and row["step"] > 0]
    lengths = sorted(row["step"] - last["step"] for last, row in pairwise(logged))
    usual = max(1, lengths[len(lengths) // 2]) if lengths else 1
    points: list[_Interval] = []
    # a fork has no rows of the steps before it
    end = logged[0]["step"] - min(logged[0]["step"], usual) if logged else 0
    first: Mapping[str, Any] | None = None
    for row in logged:
        steps, loss = row["step"] - end, training_loss(row)
        per_step = row["tokens"] / row["step"]
        if 0 < steps < usual and row is not logged[-1]:
            first = row if row is logged[0] else first
            continue
        alone = None if first is None else training_loss(first)
        if loss is not None and first is not None and alone is not None:
            before = first["step"] - end
            loss = (alone * before + loss * (steps - before)) / steps
        first, last = None, points[-1] if points else None
        if steps < usual and loss is not None and last is not None and last.loss is not None:
            loss = (last.loss * last.steps + loss * steps) / (last.steps + steps)
            points[-1] = _Interval(last.start, row["tokens"], last.steps + steps, loss)
        else:
            points.append(_Interval(per_step * end, row["tokens"], steps, loss))
        end = row["step"]
    return [((point.start + point.end) / 2, point.loss) for point in points]


class _Interval(NamedTuple):
    """Steps between two numbers of tokens, and the mean loss over them."""

    start: float
    end: float
    steps: int
    loss: float | None


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
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def loss_key(name: str) -> str:
    """Return the key of a validation set's loss in a row."""
    return f"validation/{name}/loss"


def perplexity(loss: float | None) -> float | None:
    """Return exp of a loss in nats per token; None if the loss is None or the result would overflow."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def finite(value: Any) -> float | None:
    """Return a value as JSON can represent it: None if it is not a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _is_loss(key: str) -> bool:
    return len(key) > len(loss_key("")) and key.startswith("validation/") and key.endswith("/loss")
