"""The stamp of a report's figure: what it shows, for readers who see the figure without its report."""

from depthlm.counts import count_text
from depthlm.report.rows import number
from depthlm.report.sweep import Sweep
from depthlm.runs.records import COMPLETE


def stamp_of(sweep: Sweep, beside_paper: bool = False) -> str:
    """Return the budget and the number of seeds, as in `budget smoke, 3 seeds`.

    An experiment without a paper's numbers has a budget only if that is smaller than the experiment's own; otherwise,
    the stamp has the tokens that its runs trained on. beside_paper: whether the figure also has the paper's numbers; if
    ours are not comparable with them, it says so.
    """
    budgets = " and ".join(dict.fromkeys(config.budget.name for config in sweep.configs))
    has_paper = bool(sweep.experiment.fits) or any(row.paper for row in sweep.rows)
    length = f"budget {budgets}" if has_paper or budgets != "paper" else _tokens(sweep)
    ours = ", ".join(filter(None, [length, _seeds(sweep)]))
    if not beside_paper or sweep.as_printed:
        return ours
    changed = " with a changed protocol" if sweep.changed else ""
    return f"ours: budget {budgets}{changed}, {_seeds(sweep)}; not comparable with the paper's numbers"


def _tokens(sweep: Sweep) -> str:
    """Return the tokens that the complete runs trained on; empty without a complete run."""
    counts = [tokens for run in sweep.runs if (tokens := number(run, "tokens")) is not None]
    if not counts:
        return ""
    low, high = count_text(min(counts)), count_text(max(counts))
    return f"{low} tokens" if low == high else f"{low} to {high} tokens"


def _seeds(sweep: Sweep) -> str:
    """Return the number of complete seeds of the rows that have one."""
    counts = {sum(run.state == COMPLETE for run in row.runs) for row in sweep.rows} - {0}
    if not counts:
        return "no complete run"
    low, high = min(counts), max(counts)
    number = f"{low}" if low == high else f"{low} to {high}"
    return f"{number} seed{'' if high == 1 else 's'}"
