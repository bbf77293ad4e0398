"""The report of any run directories: their numbers, the differences of their configurations, and their losses."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthlm.config.experiment import Experiment
from depthlm.config.keys import on_resume, override_text
from depthlm.config.names import importance, normal_value, setting_texts
from depthlm.config.resolve import LENGTHS
from depthlm.errors import UserError, nearest
from depthlm.report.rows import Row, with_unique_labels
from depthlm.report.sweep import LOSS, Sweep, with_baseline
from depthlm.report.sweep_report import sweep_report
from depthlm.report.tables import DASH, Table, cells, plain
from depthlm.run_directory import RunDirectory
from depthlm.runs.listing import run_folders
from depthlm.runs.records import RunRecord, read_run, recorded_settings, with_one_source
from depthlm.streams import printable
from depthlm.sweeps.point import Point

# runs per table of differing settings
BESIDE = 4
# before the names of the settings by which a run is named
DIFFERENCES = "differences."
# the file of a report
REPORT = "report.md"
# in place of the value of a setting that a run does not have
ABSENT = object()
# in the label of a row whose runs choose a setting
CHOOSES = "seeds that choose"
# the title of the table of settings, and what replaces it
SETTINGS = "Settings that differ"
NO_DIFFERENCE = "No setting but the seed differs that affects the result"


def find_runs(names: Sequence[str]) -> list[RunRecord]:
    """Return the runs in these directories, or in folders of them, each once and in order.

    Raises UserError for a name without runs.
    """
    by_directory: dict[Path, RunRecord] = {}
    errors = []
    for name in names:
        folder = Path(name)
        paths = run_folders(folder) if folder.is_dir() and not holds_run(folder) else [folder]
        runs = [read_run(path) for path in filter(holds_run, paths)]
        # the reports beside the runs that `outputs/default/*` names
        if not runs and not (folder / REPORT).is_file():
            errors.append(f"{name}: {_why(folder)}")
        for run in runs:
            by_directory.setdefault(run.directory.resolve(), run)
    if not errors and not by_directory:
        errors.append("no run in these folders; name run directories, or a folder of them, as in outputs/default")
    if errors:
        raise UserError("\n".join(errors))
    return with_one_source(list(by_directory.values()))


def holds_run(directory: Path) -> bool:
    """Return whether a run has been started in a directory."""
    run = RunDirectory(directory)
    files = run.config, run.metrics, run.summary, run.failure
    return directory.is_dir() and any(file.is_file() for file in files)


def _why(folder: Path) -> str:
    if folder.is_dir():
        return "this folder contains no run (none of config.yaml, metrics.jsonl, summary.json)"
    beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    return f"no such folder{nearest(folder.name, beside)}"


def runs_report(runs: Sequence[RunRecord], folder: Path, baseline: str | None = None) -> tuple[str, list[Table]]:
    """Draw the losses into a folder. Returns the Markdown report, and its tables of results and differing settings.

    Raises OSError; UserError if no run is the baseline.
    """
    recorded = {run.directory: recorded_settings(run.directory) for run in runs}
    readable = [run for run in runs if recorded[run.directory]] or list(runs)
    sweep = with_baseline(sweep_of_runs(readable, [recorded[run.directory] for run in readable]), baseline)
    settings = {
        row.label: {key: value for key, value in recorded[row.runs[0].directory].items() if key != "seed"}
        for row in sweep.rows
    }
    tables = difference_tables({label: config for label, config in settings.items() if config})
    unread = ", ".join(str(run.directory) for run in runs if run not in readable)
    notes = [f"No readable config.yaml, so not in the table: {plain(unread)}."] if unread else []
    return sweep_report(sweep, folder, tables, notes)


def sweep_of_runs(runs: Sequence[RunRecord], configs: Sequence[dict[str, Any]]) -> Sweep:
    """Return these runs as a sweep; those that differ only in the seed form one row. configs: of each run."""
    names = short_names([run.directory for run in runs])
    # by the settings without the seed, and whether the runs choose
    identities: dict[tuple[str, bool], list[list[int]]] = {}
    for number, config in enumerate(configs):
        shared = {key: value for key, value in config.items() if key != "seed" and on_resume(key) != "free"}
        identity = repr(sorted(shared.items())) if config else names[number]
        groups = identities.setdefault((identity, _chooses(config)), [])
        seed = config.get("seed")
        # a second run of one seed has a row of its own
        group = next((group for group in groups if all(configs[member].get("seed") != seed for member in group)), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    firsts = {identity: groups[0][0] for (identity, _), groups in identities.items()}
    without_seed = {
        names[number]: {key: value for key, value in configs[number].items() if key != "seed"}
        for number in firsts.values()
    }
    labels = distinguishing_settings(without_seed)
    has_seed = all("seed" in config for config in configs)
    is_single = all(len(group) == 1 for groups in identities.values() for group in groups)
    differ_in_seed = has_seed and is_single and len({config["seed"] for config in configs}) > 1
    rows = []
    for (identity, chooses), groups in identities.items():
        for group in groups:
            parts = labels[names[firsts[identity]]]
            given = configs[group[0]].get("name")
            if given and len(group) == 1:
                parts = {"name": str(given)}
            else:
                parts = parts | ({"seed": f"seed {configs[group[0]]['seed']}"} if differ_in_seed else {})
                parts = parts | ({"run": names[group[0]]} if len(groups) > 1 and len(group) == 1 else {})
            if len(group) > 1 and "run" in parts:
                # a folder is named after one seed
                parts = parts | {"run": re.sub(r"-seed\d+", "", parts["run"])}
            parts = parts | ({CHOOSES: CHOOSES} if chooses else {})
            points = [_point(configs[number], parts) for number in group]
            rows.append(Row(points, [runs[number] for number in group], parts))
    return Sweep(Experiment(), with_unique_labels(rows), LOSS, [], [])


def _chooses(config: Mapping[str, Any]) -> bool:
    """Return whether a run chooses a setting with its seed, so that its loss reports nothing."""
    seeds = config.get("experiment.selection_seeds")
    return isinstance(seeds, list) and config.get("seed") in seeds


def _point(config: Mapping[str, Any], parts: dict[str, str]) -> Point:
    """Return the point of a run with these settings, without overrides."""
    # the code of a mechanism follows from it, and an experiment is no setting
    settings = {key: value for key, value in config.items() if not f"{key}.".startswith(("code.", "experiment."))}
    groups = {key.removesuffix(".name"): override_text(v) for key, v in settings.items() if key.endswith(".name")}
    fixed = {key: override_text(value) for key, value in settings.items() if on_resume(key) == "fixed"}
    return Point([], groups | fixed, parts)


def short_names(directories: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as make all of them distinct, in characters that can be drawn."""
    parts = [tuple(map(printable, directory.parts)) or (".",) for directory in directories]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [printable(str(directory)) for directory in directories]


def distinguishing_settings(configs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the parts of a label for each run: the settings that differ, or its name where these are not enough.

    They are the mechanism, the size, and the settings by which some run is named (`Config.differences`). A group is
    represented by its option, as in `mhc, lr 0.01`.
    """
    keys = {name for config in configs.values() for name in config}
    named = {name.removeprefix(DIFFERENCES) for name in keys if name.startswith(DIFFERENCES)}
    labels: dict[str, dict[str, str]] = {run: {} for run in configs}
    for name in ("model", "size", *sorted({"extended_at", *named} - {"model", "size"}, key=importance)):
        texts = {run: text for run, config in configs.items() if (text := _setting(name, config)) is not None}
        if len({*texts.values()}) > 1 or 0 < len(texts) < len(configs):
            shown = setting_texts(name, [*texts.values()])
            for run, text in texts.items():
                labels[run][name] = shown[text]
    models = {run: {"model": str(config["model.name"])} for run, config in configs.items() if "model.name" in config}
    is_distinct = len({tuple(label.items()) for label in labels.values()}) == len(labels)
    return {run: (label or models.get(run) if is_distinct else None) or {"run": run} for run, label in labels.items()}


def _setting(name: str, config: Mapping[str, Any]) -> str | None:
    """Return the value of a key, or the option of a group, as text; None where a run has none, or another length."""
    value = config.get(name, config.get(f"{name.replace('/', '.')}.name", ABSENT))
    return None if value is ABSENT or (value is None and name in LENGTHS) else override_text(value)


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
        rows = [cells([key, *(_text(key, value) for value in values[beside])]) for key, values in different.items()]
        title = SETTINGS if start == 0 else ""
        tables.append(Table(["setting", *names[beside]], rows, title, words=True))
    return tables


def differing_settings(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that affect the result and differ, with the value of each run, ABSENT where it has none.

    Without the settings of a mechanism that follow from its name.
    """
    keys = sorted({key for config in configs for key in config if on_resume(key) != "free"})
    values = {key: [config.get(key, ABSENT) for config in configs] for key in keys}
    different = {key: row for key, row in values.items() if any(value != row[0] for value in row)}
    models = different.get("model.name", [])
    return {key: row for key, row in different.items() if not (models and _follows(key, row, models))}


def _follows(key: str, values: Sequence[Any], models: Sequence[Any]) -> bool:
    """Return whether a setting of a mechanism has the same value in all runs of each mechanism, so its name says it."""
    if not key.startswith(("model.connection.", "model.attention.")):
        return False
    by_model = {repr(model): value for model, value in zip(models, values, strict=True)}
    return all(by_model[repr(model)] == value for model, value in zip(models, values, strict=True))


def _text(key: str, value: Any) -> str:
    return DASH if value is ABSENT else normal_value(key, override_text(value))
