"""The stamp of a report's figure: what it shows, for readers who see the figure without its report."""

from depthlm.report.sweep import Sweep
from depthlm.runs.records import COMPLETE


def stamp_of(sweep: Sweep, beside_paper: bool = False) -> str:
    """Return the budget and the number of seeds, as in `budget smoke, 3 seeds`.

    Without a smaller budget, an experiment that has no paper's numbers has no budget either. beside_paper: whether the
    figure also has the paper's numbers; if ours are not comparable with them, it says so.
    """
    budgets = " and ".join(dict.fromkeys(config.budget.name for config in sweep.configs))
    has_paper = bool(sweep.experiment.fits) or any(row.paper for row in sweep.rows)
    ours = f"budget {budgets}, {_seeds(sweep)}" if has_paper or budgets != "paper" else _seeds(sweep)
    if not beside_paper or sweep.as_printed:
        return ours
    changed = " with a changed protocol" if sweep.changed else ""
    return f"ours: budget {budgets}{changed}, {_seeds(sweep)}; not comparable with the paper's numbers"


def _seeds(sweep: Sweep) -> str:
    """Return the number of complete seeds of the rows that have one."""
    counts = {sum(run.state == COMPLETE for run in row.runs) for row in sweep.rows} - {0}
    if not counts:
        return "no complete run"
    low, high = min(counts), max(counts)
    number = f"{low}" if low == high else f"{low} to {high}"
    return f"{number} seed{'' if high == 1 else 's'}"
