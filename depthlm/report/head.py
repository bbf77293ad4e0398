"""The head of a report: the state of the runs, the protocol, and caveats of the comparison."""

from depthlm.report.protocol import protocol_table, trained_otherwise
from depthlm.report.rows import Row, number, paper
from depthlm.report.sweep import Sweep, title_of
from depthlm.report.tables import Table, cells, markdown, number_text, plain
from depthlm.runs.records import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, RunRecord

STATES = (COMPLETE, RUNNING, STOPPED, FAILED, WAITING)


def state_line(runs: list[RunRecord]) -> str:
    """Return the number of runs in each state, as text."""
    counts = {state: sum(run.state == state for run in runs) for state in STATES}
    by_state = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {by_state}"


def head(sweep: Sweep) -> str:
    """Return the head of an experiment's report, in Markdown."""
    experiment = sweep.experiment
    parts = [f"# {plain(experiment.title or experiment.name)}"]
    if experiment.source:
        parts.append(f"Source: {plain(experiment.source)}. Experiment: `{experiment.name}`.")
    else:
        parts.append(f"Experiment: `{experiment.name}`.")
    parts += [f"**{warning}**" for warning in warnings(sweep)]
    parts.append(f"## State\n\n{state_line(sweep.runs)}.")
    if (table := missing_table(sweep.rows)) is not None:
        parts.append(markdown(table))
    if waiting := [who for _, run, who in named_runs(sweep.rows) if run.state == WAITING]:
        parts.append(f"Waiting: {plain('; '.join(waiting))}.")
    parts += unmeasured(sweep) + otherwise(sweep)
    parts.append(f"## Protocol\n\n{markdown(protocol_table(sweep.rows, sweep.configs))}")
    for title, lines in (
        ("Not given in the paper; assumed instead", experiment.assumed),
        ("Notes", experiment.notes),
    ):
        if lines:
            parts.append("\n".join([f"{title}:", "", *(f"- {plain(str(line))}" for line in lines)]))
    return "\n\n".join(parts)


def warnings(sweep: Sweep) -> list[str]:
    """Return the reasons why the numbers are not comparable with the paper's, as sentences."""
    sentences = []
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


def missing_table(rows: list[Row]) -> Table | None:
    """Return the table of started but incomplete runs: newest step and loss, or the failure; None without such runs."""
    lines = []
    for _, run, who in named_runs(rows):
        if run.state in (COMPLETE, WAITING):
            continue
        why = first_line(run.failure) if run.state == FAILED else ""
        step = "" if run.step is None else f"{run.step:,}"
        lines.append(cells([who, run.state, step, number_text(run.loss, 4) if run.rows else "", why]))
    if not lines:
        return None
    return Table(["incomplete run", "state", "newest step", "training loss", "failure"], lines, words=True)


def named_runs(rows: list[Row]) -> list[tuple[Row, RunRecord, str]]:
    """Return every run with its row and its name: the label, with the seed where the row has several runs."""
    return [
        (row, run, f"{row.label}, seed {seed}" if len(row.runs) > 1 else row.label)
        for row in rows
        for run, seed in zip(row.runs, row.seeds, strict=True)
    ]


def first_line(failure: str | None) -> str:
    """Return the first line of an error, truncated where it is long."""
    text = (failure or "").strip().split("\n")[0]
    return text if len(text) <= 160 else f"{text[:157]}..."


def unmeasured(sweep: Sweep) -> list[str]:
    """Return a sentence for each group of columns for which equally many complete runs have no number."""
    titles: dict[tuple[int, int], list[str]] = {}
    for name, column in sweep.columns.items():
        printed = any(paper(row, name) is not None for row in sweep.rows)
        # where the paper prints a column only for some rows, the others need no number
        expected = [row for row in sweep.rows if column.metric and not (printed and paper(row, name) is None)]
        complete = [run for row in expected for run in row.runs if run.state == COMPLETE]
        without = sum(number(run, column.metric, column.at) is None for run in complete)
        if without:
            at = f" after {column.at:.0%} of the steps" if column.at < 1 else ""
            title = f"{plain(title_of(name, column))} (`{column.metric}`{at})"
            titles.setdefault((without, len(complete)), []).append(title)
    return [
        f"{without} of {count} complete runs have no finite number yet for {', '.join(group)}."
        for (without, count), group in titles.items()
    ]


def otherwise(sweep: Sweep) -> list[str]:
    """Return a list of the runs whose settings differ from the reported protocol, as at most one paragraph."""
    lines = []
    for row, config in zip(sweep.rows, sweep.configs, strict=True):
        for run in row.runs:
            differ = trained_otherwise(run, config)
            if differ:
                more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
                lines.append(f"- {plain(row.label)}: {plain('; '.join(differ[:4]))}{more}")
    if not lines:
        return []
    return ["\n".join(["These runs trained with settings that differ from the protocol below:", "", *lines])]
