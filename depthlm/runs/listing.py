"""The runs below a folder: their state, their newest numbers, and every value that a filter may name."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from depthlm.config.errors import nearest
from depthlm.errors import UserError
from depthlm.run_directory import REMOVING, RunDirectory
from depthlm.runs.filters import Comparison, parse_comparison
from depthlm.runs.records import RunRecord, read_run, recorded_settings
from depthlm.runs.validation_losses import finite

# folders whose config.yaml files do not belong to runs: code snapshots, and the files of W&B
IGNORED = {".slurm", "wandb"}


@dataclass(frozen=True)
class Listed:
    """An entry of the list. loss: the last logged training loss. age: seconds since the last write to the directory.

    values: all that a filter may compare: the fields above, the settings of config.yaml, the results in summary.json,
    and the newest value of each number in metrics.jsonl. A group stands for its name: `model` for `model.name`.
    """

    directory: str
    state: str
    model: str
    size: str
    step: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    age: float
    values: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def fields(self) -> dict[str, Any]:
        """Return the fields without `values`, by name."""
        return {name: value for name, value in asdict(self).items() if name != "values"}


FIELDS = frozenset(Listed.__dataclass_fields__) - {"values"}


def list_runs(root: Path, filters: Sequence[str] = (), sort: str = "") -> list[Listed]:
    """Return the runs below a folder that match all filters.

    sort: the key by which they are sorted, the smallest value first and runs without a value last; by default the run
    that changed last is the last. Raises UserError for a filter that cannot be read, or for a key that no run has.
    """
    comparisons, words = read_filters(filters)
    runs = [_listed(folder) for folder in run_folders(root)]
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
    configs = root.rglob(RunDirectory(root).config.name)
    return sorted({file.parent for file in configs if not _is_ignored(file.relative_to(root).parts)})


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


def check_keys(keys: Sequence[str], runs: Sequence[Listed]) -> None:
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


def _is_ignored(parts: Collection[str]) -> bool:
    return not IGNORED.isdisjoint(parts) or any(part.startswith(REMOVING) for part in parts)


def _matches(run: Listed, root: Path, text: str) -> bool:
    # every run would match a word in the path of the root itself
    below, text = str(Path(run.directory).relative_to(root)), text.removeprefix(f"{root}/")
    return text in below or any(text == word or fnmatch(word, text) for word in (below, run.state, run.model, run.size))


def _rank(value: Any) -> tuple[int, float, str]:
    """Return what orders values of any type: numbers, then text, then missing values."""
    if value is None:
        return 2, 0.0, ""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _listed(folder: Path) -> Listed:
    paths = RunDirectory(folder)
    run, settings = read_run(folder), recorded_settings(folder)
    newest = max(file.stat().st_mtime for file in (paths.config, paths.metrics, paths.summary) if file.exists())
    last = run.rows[-1] if run.rows else {}
    tokens = finite(run.summary.get("tokens", last.get("tokens")))
    names = {key.removesuffix(".name"): value for key, value in settings.items() if key.endswith(".name")}
    listed = Listed(
        directory=str(folder),
        state=run.state,
        model=str(names.get("model", "?")),
        size=str(names.get("size", "?")),
        step=run.step,
        tokens=None if tokens is None else int(tokens),
        loss=run.loss,
        validation_loss=run.number("validation_loss"),
        age=max(0.0, time.time() - newest),
    )
    own = {key: value for key, value in listed.fields().items() if value is not None and value != "?"}
    return Listed(**listed.fields(), values=_numbers(run) | settings | names | own)


def _numbers(run: RunRecord) -> dict[str, float]:
    """Return the newest value of each number of a run, without those that are not finite."""
    newest: dict[str, Any] = {}
    for content in (*run.rows, run.summary):
        newest |= content
    return {name: number for name, value in newest.items() if (number := finite(value)) is not None}
