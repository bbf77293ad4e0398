"""The report of any run directories: their numbers, the differences of their configurations, and their losses."""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthlm.config.errors import nearest
from depthlm.config.keys import on_resume
from depthlm.counts import count_text
from depthlm.errors import UserError
from depthlm.report.experiment_report import first_line, picture, state_line
from depthlm.report.figures.loss_curves import LossCurve, Panel, draw_loss_curves
from depthlm.report.figures.style import mechanism_of_run
from depthlm.report.rows import number, setting_title
from depthlm.report.tables import DASH, Cell, Table, cells, markdown, number_text, plain
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import FAILED, RunRecord, read_run, recorded_settings
from depthlm.streams import printable

# runs per table of differing settings
BESIDE = 4
# in place of the value of a setting that a run does not have
ABSENT = object()
NO_DIFFERENCE = "No setting that affects the result differs"


def find_runs(names: Sequence[str], option: str = "runs=") -> list[RunRecord]:
    """Return the runs in these directories, globs allowed, each once and in order.

    option: where the user gave the names, for messages. Raises UserError for a name without runs.
    """
    by_directory: dict[Path, RunRecord] = {}
    errors = []
    for text in filter(None, (name.strip() for name in names)):
        is_glob = glob.has_magic(text) and not Path(text).exists()
        paths = sorted(glob.glob(text, recursive=True)) if is_glob else [text]
        runs = [read_run(path) for path in paths if holds_run(Path(path))]
        if not runs:
            errors.append(f"{option}{text}: {_why(text, is_glob)}")
        for run in runs:
            by_directory.setdefault(run.directory.resolve(), run)
    if not errors and not by_directory:
        errors.append(f"{option}: name run directories, as in runs=outputs/default/base,outputs/default/model-mhc")
    if errors:
        raise UserError("\n".join(errors))
    return list(by_directory.values())


def holds_run(directory: Path) -> bool:
    """Return whether a run has been started in a directory."""
    run = RunDirectory(directory)
    files = run.config, run.metrics, run.summary, run.failure
    return directory.is_dir() and any(file.is_file() for file in files)


def _why(text: str, is_glob: bool) -> str:
    path = Path(text)
    if is_glob:
        return "no run directory matches this pattern"
    if path.is_dir():
        return "this folder contains no run (none of config.yaml, metrics.jsonl, summary.json)"
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    return f"no such folder{nearest(path.name, beside)}"


def runs_report(runs: Sequence[RunRecord], folder: Path) -> tuple[str, list[Table]]:
    """Draw the losses into a folder. Returns the Markdown report, and the tables of it that the terminal shows: the
    results, and the settings that differ. Raises OSError.
    """
    names = short_names([run.directory for run in runs])
    configs = {name: recorded_settings(run.directory) for name, run in zip(names, runs, strict=True)}
    main = summary_table(runs, names)
    parts = ["# Runs", f"{state_line(runs)}.", markdown(main)]
    failed = [
        f"- {plain(n)} failed: {plain(first_line(r.failure))}"
        for n, r in zip(names, runs, strict=True)
        if r.state == FAILED
    ]
    parts += ["\n".join(failed)] if failed else []
    parts.append("## Differences between the configurations")
    unread = [name for name, config in configs.items() if not config]
    if unread:
        parts.append(f"No readable config.yaml: {plain(', '.join(unread))}.")
    tables = difference_tables({name: config for name, config in configs.items() if config})
    parts += [markdown(table) for table in tables] if tables else [f"{NO_DIFFERENCE}."]
    name = "loss_curves.png"
    stamp = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    drawn = draw_loss_curves(panels_by_size(runs, configs), folder / name, stamp)
    parts.append(picture("Loss curves", folder, name, drawn))
    return "\n\n".join(parts) + "\n", [main, *tables]


def panels_by_size(runs: Sequence[RunRecord], configs: Mapping[str, dict[str, Any]]) -> list[Panel]:
    """Return the loss curves of the runs, with a panel for each model size. configs: of the runs, by name."""
    sizes: dict[str, dict[str, RunRecord]] = {}
    for run, (name, config) in zip(runs, configs.items(), strict=True):
        sizes.setdefault(str(config.get("size.name") or ""), {})[name] = run
    panels = []
    for size, members in sizes.items():
        labels = distinguishing_settings({name: configs[name] for name in members})
        curves = [
            LossCurve(labels[name], mechanism_of_run(name, run.directory, configs[name]), [run])
            for name, run in members.items()
        ]
        panels.append(Panel(size, curves))
    return panels


def short_names(directories: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as make all of them distinct, in characters that can be drawn."""
    parts = [tuple(map(printable, directory.parts)) or (".",) for directory in directories]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [printable(str(directory)) for directory in directories]


def distinguishing_settings(configs: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return a label for each run: the first settings that distinguish all of them, or else the names of the runs.

    A group is represented by its option's name where that differs, as in `mhc, lr 0.01`.
    """
    labels = dict.fromkeys(configs, "")
    different = differing_settings(list(configs.values()))
    for key in sorted(different, key=lambda key: (not key.endswith(".name"), key)):
        name = "" if key.endswith(".name") else f"{setting_title(key)} "
        longer = {
            run: ", ".join(filter(None, [label, f"{name}{_value_text(value)}"]))
            for (run, label), value in zip(labels.items(), different[key], strict=True)
        }
        if len(set(longer.values())) > len(set(labels.values())):
            labels = longer
    return labels if len(set(labels.values())) == len(labels) > 1 else {name: name for name in configs}


def summary_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table:
    """Return the table of each run's results, or its progress where it is not complete."""
    head = ["run", "state", "step", "parameters", "tokens", "training loss", "validation loss", "perplexity"]
    rows = []
    for run, name in zip(runs, names, strict=True):
        newest: dict[str, Any] = run.rows[-1] if run.rows else {}
        values = {key: number(run, key) for key in ("parameters", "tokens", "tokens_per_second", "wall_seconds")}
        tokens = values["tokens"] or newest.get("tokens")
        loss = run.loss if number(run, "training_loss") is None else number(run, "training_loss")
        step = number(run, "steps") or run.step
        texts = [
            DASH if step is None else f"{step:,.0f}",
            DASH if values["parameters"] is None else count_text(values["parameters"]),
            DASH if tokens is None else count_text(tokens),
            number_text(loss, 4),
            number_text(number(run, "validation_loss"), 4),
            number_text(number(run, "validation_perplexity"), 3),
            number_text(values["tokens_per_second"], 0),
            duration(values["wall_seconds"]),
        ]
        rows.append([Cell(name), Cell(run.state), *cells(texts)])
    return Table([*head, "tokens/s", "wall time"], rows)


def duration(seconds: float | None) -> str:
    """Return seconds as `2 h 05 min`, `3 min 20 s` or `12.3 s`; a dash for None."""
    if seconds is None:
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def difference_tables(configs: Mapping[str, dict[str, Any]]) -> list[Table]:
    """Return tables of the settings that differ between runs and affect the result, with a few runs per table.

    configs: of the runs, by name.
    """
    names, different = list(configs), differing_settings(list(configs.values()))
    if not different:
        return []
    tables = []
    for start in range(0, len(names), BESIDE):
        beside = slice(start, start + BESIDE)
        rows = [cells([key, *map(_value_text, values[beside])]) for key, values in different.items()]
        tables.append(Table(["setting", *names[beside]], rows, words=True))
    return tables


def differing_settings(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that affect the result and differ, with the value of each run, ABSENT where it has none."""
    keys = sorted({key for config in configs for key in config if on_resume(key) != "free"})
    values = {key: [config.get(key, ABSENT) for config in configs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _value_text(value: Any) -> str:
    return DASH if value is ABSENT else "null" if value is None else str(value)
