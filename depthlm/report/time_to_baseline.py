"""The training time after which a run first has the baseline's final validation loss (Table 1 of arXiv 2502.06785)."""

from statistics import fmean

from depthlm.report.rows import Row
from depthlm.runs.records import COMPLETE, RunRecord, Validation, ValidationLosses

METRIC = "time_to_baseline"


def times_to_baseline(row: Row, baseline: Row) -> list[float | None]:
    """Return the time of each run of a row, as a share of the baseline's training time; None if it never has the loss.

    Both are those of the baseline's run with the same seed, or means over its complete runs where it has no such run;
    None where the last validation of one of these is not finite. The time is that of a validation, so it is exact to
    the steps between two of them. A run and its baseline must be complete.
    """
    ends: dict[str, Validation | None] = {}
    for seed, run in zip(baseline.seeds, baseline.runs, strict=True):
        steps = [row["step"] for row in run.rows if ValidationLosses.of_row(row)]
        if run.state == COMPLETE and steps:
            # run.validations has only those that are finite
            ends[seed] = next((validation for validation in run.validations if validation.step == steps[-1]), None)
    return [
        _time(run, [ends[seed]] if seed in ends else [*ends.values()])
        for seed, run in zip(row.seeds, row.runs, strict=True)
    ]


def _time(run: RunRecord, ends: list[Validation | None]) -> float | None:
    """Return the share of the mean time of these validations after which a run has at most their mean loss."""
    known = [end for end in ends if end is not None]
    totals = [end.seconds for end in known if end.seconds]
    if run.state != COMPLETE or not totals or len(known) < len(ends):
        return None
    loss = fmean(end.loss for end in known)
    seconds = next((validation.seconds for validation in run.validations if validation.loss <= loss), None)
    return None if seconds is None else seconds / fmean(totals)
