"""The report of an experiment: state and protocol of its runs, then tables and figures beside the paper's."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from depthlm.config.keys import flatten, in_protocol
from depthlm.config.protocol import protocol_texts
from depthlm.config.schema import Config
from depthlm.counts import duration_text
from depthlm.errors import join_names
from depthlm.locations import command
from depthlm.report.choice import choice_parts, choice_state, choice_tables
from depthlm.report.comparison import comparison_tables, differences_from_baseline
from depthlm.report.equal_cost import cost_parts
from depthlm.report.figures.charts import draw_bars, draw_lines
from depthlm.report.figures.loss_curves import draw_loss_curves, draw_validation_curves
from depthlm.report.figures.scaling import draw_scaling
from depthlm.report.figures.sublayer_norms import draw_sublayer_norms
from depthlm.report.rows import Row
from depthlm.report.scaling_laws import LEGEND as SCALING_LEGEND
from depthlm.report.scaling_laws import curves, fit_table, savings
from depthlm.report.sweep import LOSS, Sweep, range_text
from depthlm.report.tables import DASH, MISSING, Table, cells, markdown, number_text, plain
from depthlm.runs.progress import failure_text
from depthlm.runs.records import (
    COMPLETE,
    FAILED,
    RUNNING,
    STOPPED,
    WAITING,
    RunRecord,
    differing_texts,
    recorded_settings,
)

# characters of the reason of a failure in a report
LONGEST_REASON = 160
STATES = (COMPLETE, RUNNING, STOPPED, FAILED, WAITING)
LEGEND = (
    f"{DASH}: the paper prints no number, or a complete run has none. {MISSING}: no run is complete. Bold: the best of "
    "ours, where the 95% intervals of its differences from all others exclude 0. Points that differ only in the seed "
    "form one row: mean ± sample standard deviation; after a number of the paper's, ± is the spread that it prints."
)
TASKS = f"`{command('-m depthlm evaluate', 'evaluate')} run=<run> tasks=...` measures the tasks of a run."
SUBSTITUTED = (
    "No complete run has a number of this experiment: its metrics need data or tasks that these runs do not have. The "
    "validation loss stands in for them, and the figure shows it."
)
FIGURES: dict[str, Callable[[Sweep, Path], list[str] | None]] = {"bars": draw_bars, "lines": draw_lines}


def experiment_report(sweep: Sweep, folder: Path) -> tuple[str, list[Table]]:
    """Draw the figures into a folder; return the Markdown report and the tables of its first group. Raises OSError."""
    substituted = with_available_metric(sweep)
    parts = [*_head(sweep), "## Results"]
    if substituted is not sweep:
        sweep = substituted
        parts.append(f"**{plain(SUBSTITUTED)}**")
    groups = comparison_tables(sweep)
    parts += [markdown(table) for tables in groups.values() for table in tables]
    parts.append(LEGEND)
    if any("_shot/" in column.metric for column in sweep.columns.values()):
        parts.append(TASKS)
    parts += differences_from_baseline(sweep)
    parts += choice_parts(sweep, folder)
    figure = sweep.experiment.figure
    path = folder / f"{figure}.png"
    if figure == "scaling":
        fitted = curves(sweep)
        notes = draw_scaling(sweep, fitted, savings(sweep, fitted), path)
        parts += [picture("Scaling", path, notes), markdown(fit_table(sweep, fitted)), plain(SCALING_LEGEND)]
    elif figure != "none":
        parts.append(picture("Figure", path, FIGURES[figure](sweep, path)))
    parts += cost_parts(sweep, folder)
    for over in sweep.experiment.curves:
        if over == "depth":
            path = folder / "sublayer_norms.png"
            parts.append(picture("Sublayers over depth", path, draw_sublayer_norms(sweep, path)))
        else:
            path = folder / f"perplexity_over_{over}.png"
            notes = draw_validation_curves(sweep, over, path)
            parts.append(picture(f"Validation perplexity over {over}", path, notes))
    parts += [_picture_section(sweep, folder / f"{name}.png") for name in sweep.experiment.pictures]
    path = folder / "loss_curves.png"
    parts += [picture("Loss curves", path, draw_loss_curves(sweep, path)), markdown(runs_table(sweep))]
    return "\n\n".join(parts) + "\n", [*next(iter(groups.values())), *choice_tables(sweep)]


def with_available_metric(sweep: Sweep) -> Sweep:
    """Return the sweep with the validation loss as first column if its runs have no number for any other column."""
    runs = [run for run in sweep.runs if run.state == COMPLETE]
    has_any = any(run.number(column.metric, column.at) is not None for run in runs for column in sweep.columns.values())
    if has_any or not any(run.number(LOSS["loss"].metric) is not None for run in runs):
        return sweep
    return replace(sweep, columns={"validation_loss": LOSS["loss"]} | sweep.columns)


def picture(title: str, path: Path, notes: Sequence[str] | None) -> str:
    """Return a section with a figure and its notes; notes is None where there was nothing to draw."""
    if notes is None:
        # the figure of an earlier report must not be shown in this one
        path.unlink(missing_ok=True)
        return f"## {title}\n\nNothing to draw yet."
    return "\n\n".join([f"## {title}", f"![{title}]({path.name})", *([plain(" ".join(notes))] if notes else [])])


def _head(sweep: Sweep) -> list[str]:
    """Return the title, the state of the runs, the protocol, and the caveats of the comparison, in Markdown."""
    experiment = sweep.experiment
    source = f"Source: {plain(experiment.source)}. " if experiment.source else ""
    parts = [f"# {plain(experiment.title or experiment.name)}", f"{source}Experiment: `{experiment.name}`."]
    parts += [f"**{warning}**" for warning in warnings(sweep)]
    parts += [f"## State\n\n{state_line(sweep.every_run)}.", *choice_state(sweep), *result_notes(sweep)]
    parts += protocol_parts(sweep)
    # a budget without the paper's data has replaced most of what is assumed about the protocol
    assumed = [] if any(config.budget.offline for config in sweep.configs) else experiment.assumed
    for title, lines in (("Not given in the paper; assumed instead", assumed), ("Notes", experiment.notes)):
        if lines:
            parts.append("\n".join([f"{title}:", "", *(f"- {plain(str(line))}" for line in lines)]))
    return parts


def _picture_section(sweep: Sweep, path: Path) -> str:
    """Return a section with a picture of `depthlm inspect`, copied from the first run that has it."""
    sources = [source for run in sweep.runs if (source := run.directory / "inspect" / path.name).is_file()]
    if sources:
        shutil.copyfile(sources[0], path)
        return picture(path.stem, path, [])
    run = next((run.directory for run in sweep.runs if run.state == COMPLETE), None)
    how = f" `{command('-m depthlm inspect', 'inspect')} run={run}` draws it." if run is not None else ""
    return picture(path.stem, path, None) + how


def protocol_parts(sweep: Sweep) -> list[str]:
    """Return the protocol of a sweep, the runs that do not follow it, and the sizes of its models, in Markdown.

    Empty without rows or configurations.
    """
    if not (sweep.rows and sweep.configs):
        return []
    lines: dict[tuple[str, str, str], list[RunRecord]] = {}
    for row, config in zip(sweep.rows, sweep.configs, strict=True):
        size = config.size
        lines.setdefault((size.name, f"{size.num_layers}", f"{size.hidden_size:,}"), []).extend(row.runs)
    table = []
    for shape, runs in lines.items():
        values = (
            {value for run in runs if (value := run.number(name)) is not None} for name in ("parameters", "tokens")
        )
        table.append(cells([*shape, *(range_text(found) if found else DASH for found in values)]))
    head = ["size", "layers", "width", "parameters", "trained tokens"]
    protocol = f"## Protocol\n\n{markdown(protocol_table(sweep.rows, sweep.configs))}"
    return [*_list_deviations(sweep), protocol, markdown(Table(head, table))]


def state_line(runs: Sequence[RunRecord]) -> str:
    """Return the number of runs in each state, as text."""
    counts = {state: sum(run.state == state for run in runs) for state in STATES}
    by_state = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {by_state}"


def warnings(sweep: Sweep) -> list[str]:
    """Return the reasons why the numbers are not comparable, with one another or with the paper's, as sentences."""
    sentences = [] if sweep.trial is None else [sweep.trial]
    if not sweep.experiment.name:
        return sentences
    budgets = sorted({config.budget.name for config in sweep.configs} - {"paper"})
    if budgets:
        sentences.append(
            f"The budget is {' and '.join(budgets)}, not the paper's: these runs are smaller or shorter, and their "
            "numbers are not comparable with the paper's in absolute value. Compare differences against the baseline."
        )
    if sweep.changed:
        sentences.append(
            f"The command line changes the protocol ({plain(', '.join(sweep.changed))}): these numbers are not "
            "comparable with the paper's in absolute value."
        )
    return sentences


def runs_table(sweep: Sweep) -> Table:
    """Return the table of every run: its state or why it failed, its results or progress, and its directory."""
    head = ["run", "state", "step", "training loss", "validation loss", "perplexity", "tokens/s", "wall time", "folder"]
    table, rows = [], [*sweep.selection, *sweep.rows]
    has_seeds = len({seed for row in rows for seed in row.seeds}) > 1
    for row in rows:
        for run, seed in zip(row.runs, row.seeds, strict=True):
            loss, step = run.number("training_loss"), run.number("steps") or run.step
            texts = [
                f"{row.label}, seed {seed}" if has_seeds and "seed" not in row.parts else row.label,
                f"{FAILED}: {failure_text(run.failure, LONGEST_REASON)}" if run.state == FAILED else run.state,
                DASH if step is None else f"{step:,.0f}",
                number_text(run.loss if loss is None else loss, 4),
                number_text(run.number("validation_loss"), 4),
                number_text(run.number("validation_perplexity"), 3),
                number_text(run.number("tokens_per_second"), 0),
                DASH if (seconds := run.number("wall_seconds")) is None else duration_text(seconds),
                str(run.directory),
            ]
            table.append(cells(texts))
    return Table(head, table, "Every run")


def result_notes(sweep: Sweep) -> list[str]:
    """Return the reasons why the rows cannot be compared, as a list in Markdown; empty if there are none."""
    notes = [run.damage for run in sweep.runs if run.damage is not None]
    notes += [f"validation set {name}: runs were validated on different texts" for name in differing_texts(sweep.runs)]
    return ["\n".join(f"- **{plain(note)}**" for note in notes)] if notes else []


def _list_deviations(sweep: Sweep) -> list[str]:
    """Return a list of the runs whose settings differ from the reported protocol, as at most one paragraph."""
    lines = []
    for row, config in zip(sweep.rows, sweep.configs, strict=True):
        expected = {key: value for key, value in flatten(asdict(config)).items() if in_protocol(key)}
        for run in row.runs:
            saved = recorded_settings(run.directory)
            different = [
                f"{key}: {saved[key]}, not {value}"
                for key, value in expected.items()
                if key in saved and saved[key] != value
            ]
            if at := saved.get("extended_at"):
                different.append(f"extended, after its schedule had ended at step {join_names(at)}")
            if different:
                more = f" and {len(different) - 4} more" if len(different) > 4 else ""
                lines.append(f"- {plain(row.label)}: {plain('; '.join(different[:4]))}{more}")
    if not lines:
        return []
    return ["\n".join(["These runs trained with settings that differ from the protocol below:", "", *lines])]


def protocol_table(rows: Sequence[Row], configs: Sequence[Config]) -> Table:
    """Return the protocol as a table; differing values are all listed, with their sizes where these are distinct."""
    lines: dict[str, dict[str, list[str]]] = {}
    for row, config in zip(rows, configs, strict=True):
        size = row.settings.get("size", config.size.name)
        for name, text in protocol_texts(config).items():
            sizes_of_text = lines.setdefault(name, {}).setdefault(text, [])
            if size not in sizes_of_text:
                sizes_of_text.append(size)
    table = []
    for name, texts in lines.items():
        sizes = [size for sizes_of_text in texts.values() for size in sizes_of_text]
        by_size = name != "size" and len(texts) > 1 and len(sizes) == len(set(sizes))
        values = [f"{text} ({', '.join(group)})" if by_size else text for text, group in texts.items()]
        table.append(cells([name, "; ".join(values)]))
    return Table(["protocol", "value"], table, words=True)
