"""What a run directory tells of its run, finished or not."""

import fcntl
import json
import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# the states of a run, as the tables of a sweep name them
WAITING, RUNNING, STOPPED, FAILED, COMPLETE = "waiting", "running", "stopped", "failed", "complete"

SUMMARY, FAILURE, BLOCKS = "summary.json", "failure.json", "blocks.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """What lies in a run directory. rows: those of metrics.jsonl, in order. failure: why its last attempt ended."""

    directory: Path
    state: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    evaluation: dict[str, Any]
    failure: str | None

    @property
    def step(self) -> int | None:
        """The newest step that is logged."""
        return self.rows[-1]["step"] if self.rows else None

    @property
    def loss(self) -> float | None:
        """The newest training loss that is logged, in nats per token."""
        return self.rows[-1]["loss"] if self.rows else None

    def number(self, metric: str, at: float = 1.0) -> float | None:
        """A number of a complete run, else None.

        metric: a name in summary.json, in evaluation.json, or `training_perplexity`, that of the mean training loss
        over the last 1% of the steps. at: the share of the steps after which it is taken: below 1, a validation's.
        """
        if self.state != COMPLETE or not isinstance(self.summary.get("steps"), int):
            return None
        if at < 1:
            return self._validation(metric, at)
        if metric == "training_perplexity":
            late = [row["loss"] for row in self.rows if row["step"] > 0.99 * self.summary["steps"]]
            return math.exp(sum(late) / len(late)) if late and None not in late else None
        # evaluation measures whole sets, training perhaps a part
        value = self.evaluation.get(metric, self.summary.get(metric))
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def _validation(self, metric: str, at: float) -> float | None:
        kind = metric.removeprefix("validation_")
        wanted = at * self.summary["steps"]
        measured = [row for row in self.rows if any(name.startswith("validation/") for name in row)]
        # where validations are at other steps, the nearest is not that number
        near = [row for row in measured if abs(row["step"] - wanted) <= 0.05 * self.summary["steps"]]
        if not near or kind not in ("loss", "perplexity"):
            return None
        row = min(near, key=lambda row: abs(row["step"] - wanted))
        losses = [value for name, value in row.items() if name.startswith("validation/") and name.endswith("/loss")]
        if None in losses:
            return None
        mean = sum(losses) / len(losses)
        return math.exp(mean) if kind == "perplexity" else mean


def read_run(directory: str | Path) -> RunRecord:
    """What lies in a run directory, or in none: files that are missing or torn count as empty."""
    folder = Path(directory)
    summary, failure = _json(folder / SUMMARY), _json(folder / FAILURE)
    rows = list(read_metrics(folder / "metrics.jsonl"))
    if summary:
        state = COMPLETE
    elif _held(folder / ".lock"):
        state = RUNNING
    elif failure:
        state = FAILED
    else:
        state = STOPPED if rows or any(folder.glob("checkpoints/step-*")) else WAITING
    evaluation = _json(folder / "evaluation.json")
    if "step" in evaluation and evaluation["step"] != summary.get("steps"):
        # of another checkpoint than the last
        evaluation = {}
    return RunRecord(folder, state, rows, summary, evaluation, failure.get("error"))


def read_metrics(path: Path, needed: Set[str] = frozenset({"step", "loss"})) -> Iterator[dict[str, Any]]:
    """Every whole row of a metrics.jsonl, up to one that is torn; none where there is no file.

    needed: what else than a row lacks one of these. Of blocks.jsonl they are others.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return
        if isinstance(row, dict) and needed <= row.keys():
            yield row


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _held(lock: Path) -> bool:
    """Whether a process on a node that shares this lock trains here."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
