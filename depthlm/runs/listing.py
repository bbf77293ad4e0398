"""The runs below a folder: their state, their newest numbers, and every value that a filter may name.

A filter is a word, a pattern, or a comparison such as `model=mhc`, `optimizer.lr>1e-3`, `tokens>=1M` or `age<2d`.
"""

import operator
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path
from typing import Any

from depthlm.config.keys import override_text
from depthlm.counts import SCALES, parse_count
from depthlm.errors import UserError, nearest
from depthlm.run_directory import NO_RUNS, RunDirectory
from depthlm.runs.progress import RunProgress, progress_of
from depthlm.runs.records import FAILED, STATES, RunRecord, finite, read_run, recorded_settings

AGE = "age"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
ORDERS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# a pattern of directories, such as `*/lr=0.1`, begins with another character than a key
COMPARISON = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(!=|<=|>=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)
WITHOUT_KEY = re.compile(r"\s*(!=|[=<>])")
COUNT = re.compile(rf"\d[\d_]*(\.\d+)?[{''.join(SCALES)}]", re.IGNORECASE)
AGE_TEXT = re.compile(rf"(\d+(?:\.\d+)?)\s*([{''.join(SECONDS)}])")


@dataclass(frozen=True)
class RunListing:
    """An entry of the list. loss: the last logged training loss. age: seconds since the last write to the directory.
    failure: the error of the last attempt.

    values: all that a filter may compare: the fields above, the settings of config.yaml, the results in summary.json,
    and the newest value of each number in metrics.jsonl. A group stands for its name: `model` for `model.name`.
    """

    directory: str
    state: str
    model: str
    size: str
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    age: float
    failure: str | None
    progress: RunProgress
    values: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def fields(self) -> dict[str, Any]:
        """Return the fields without `values`, and those of the progress, by name."""
        return {name: value for name, value in vars(self).items() if name in FIELDS} | asdict(self.progress)


@dataclass(frozen=True)
class Comparison:
    """A comparison of one value of a run. number: the text as a number, in seconds for an age; None if it is none."""

    key: str
    operator: str
    text: str
    number: float | None

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return whether the values of a run satisfy the comparison; false for a run without this value."""
        if self.key not in values:
            return False
        value = values[self.key]
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if self.operator in ORDERS:
            return number is not None and self.number is not None and ORDERS[self.operator](number, self.number)
        if number is not None and self.number is not None:
            equal = number == self.number
        else:
            equal = override_text(value) == self.text or fnmatchcase(override_text(value), self.text)
        return equal == (self.operator == "=")


FIELDS = (RunListing.__dataclass_fields__.keys() | RunProgress.__dataclass_fields__) - {"progress", "values"}


def list_runs(root: Path, filters: Sequence[str] = (), sort: str = "") -> list[RunListing]:
    """Return the runs below a folder that match all filters.

    sort: the key by which they are sorted, the smallest value first and runs without a value last; by default the run
    that changed last is the last. Raises UserError for a filter that cannot be read, or for a key that no run has.
    """
    comparisons, words = read_filters(filters)
    runs = [_list_run(folder) for folder in run_folders(root)]
    check_keys([*(comparison.key for comparison in comparisons), *filter(None, [sort])], runs)
    matching = [
        run
        for run in runs
        if all(comparison.matches(run.values) for comparison in comparisons)
        and all(_matches(run, root, w) for w in words)
    ]
    return sorted(matching, key=lambda run: _rank(run.values.get(sort)) if sort else (0, -run.age, ""))


def run_folders(root: Path) -> list[Path]:
    """Return the folders below `root` with a config.yaml, in order; symbolic links to folders are not followed."""
    config, runs = RunDirectory(root).config.name, []
    # unlike rglob, it skips folders that a training process removes meanwhile
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NO_RUNS]
        if config in files:
            runs.append(Path(folder))
    return sorted(runs)


def read_filters(filters: Sequence[str]) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons and the words among the filters. Raises UserError with every mistake in them."""
    comparisons, words, errors = [], [], []
    for text in filters:
        try:
            comparison = parse_comparison(text)
        except UserError as error:
            errors.append(str(error))
            continue
        if comparison is not None:
            comparisons.append(comparison)
        elif text.strip():
            words.append(text)
        else:
            errors.append("an empty filter would match every run; give a word, a pattern or a comparison")
    if errors:
        raise UserError("\n".join(errors))
    return comparisons, words


def check_keys(keys: Sequence[str], runs: Sequence[RunListing]) -> None:
    """Raise UserError for keys that no run has, each with the nearest one that some run has."""
    known = FIELDS.union(*(run.values for run in runs))
    # where there is no run, no key is a mistake
    unknown = [key for key in dict.fromkeys(keys) if key not in known] if runs else []
    if unknown:
        lines = [f"{key}: no run has this value{nearest(key, sorted(known))}" for key in unknown]
        raise UserError(
            "\n".join(lines)
            + f"\nallowed are {', '.join(sorted(FIELDS))}, each key of config.yaml, and each number in "
            "summary.json or metrics.jsonl"
        )


def parse_comparison(text: str) -> Comparison | None:
    """Return the comparison that a filter states, or None for a word or a pattern.

    Raises UserError if the key or the value is missing, if the state is none that a run can have, or if it compares
    with something other than a number by <, <=, > or >=, or an age with no time.
    """
    match = COMPARISON.fullmatch(text)
    if match is None:
        if WITHOUT_KEY.match(text):
            raise UserError(f"{text}: a comparison begins with a key, as in `loss<3.2` or `model=mhc`")
        return None
    key, sign, value = match[1], match[2].replace("==", "="), match[3]
    if not value and sign not in ORDERS:
        raise UserError(f"{text}: nothing to compare {key} with; give a value, as in `model=mhc`")
    if key == "state" and sign not in ORDERS and not any(fnmatchcase(state, value) for state in STATES):
        raise UserError(f"{text}: no run has this state; allowed: {', '.join(STATES)}{nearest(value, STATES)}")
    if key == AGE:
        age = AGE_TEXT.fullmatch(value)
        if age is None:
            raise UserError(f"{text}: an age is a number with the unit s, m, h or d, as in `age{sign}2d`")
        return Comparison(key, sign, value, float(age[1]) * SECONDS[age[2]])
    number = parse_number(value)
    if number is None and sign in ORDERS:
        raise UserError(f"{text}: {sign} needs a number, as in `{key}{sign}3.2` or `{key}{sign}10B`; `=` compares text")
    return Comparison(key, sign, value, number)


def parse_number(text: str) -> float | None:
    """Return 3.2, 1e-3 or a count such as 10B as a number; None for anything else, and for nan and infinity."""
    try:
        # parse_count is slow for 1e99999999, but exact for large counts and for 1.1B
        return parse_count(text) if re.fullmatch(r"[\d_]+", text) or COUNT.fullmatch(text) else finite(float(text))
    except ValueError:
        return None


def _matches(run: RunListing, root: Path, text: str) -> bool:
    # every run would match a word in the path of the root itself
    below, text = str(Path(run.directory).relative_to(root)), text.removeprefix(f"{root}/")
    return text in below or any(text == word or fnmatch(word, text) for word in (below, run.state, run.model, run.size))


def _rank(value: Any) -> tuple[int, float, str]:
    """Return the sort key of a value of any type: numbers, then text, then missing values."""
    if value is None:
        return 2, 0.0, ""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _list_run(folder: Path) -> RunListing:
    paths = RunDirectory(folder)
    run, settings = read_run(folder), recorded_settings(folder)
    newest = max(file.stat().st_mtime for file in (paths.config, paths.metrics, paths.summary) if file.exists())
    last = run.rows[-1] if run.rows else {}
    tokens = finite(run.summary.get("tokens", last.get("tokens")))
    names = {key.removesuffix(".name"): value for key, value in settings.items() if key.endswith(".name")}
    listing = RunListing(
        directory=str(folder),
        state=run.state,
        model=str(names.get("model", "?")),
        size=str(names.get("size", "?")),
        tokens=None if tokens is None else int(tokens),
        loss=run.loss,
        validation_loss=run.number("validation_loss"),
        age=max(0.0, time.time() - newest),
        failure=run.failure if run.state == FAILED else None,
        progress=progress_of(run),
    )
    present = {key: value for key, value in listing.fields().items() if value is not None and value != "?"}
    return replace(listing, values=_numbers(run) | settings | names | present)


def _numbers(run: RunRecord) -> dict[str, float]:
    """Return the newest value of each number of a run, without those that are not finite."""
    newest: dict[str, Any] = {}
    for content in (*run.rows, run.summary):
        newest |= content
    return {name: number for name, value in newest.items() if (number := finite(value)) is not None}
