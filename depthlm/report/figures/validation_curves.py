"""The validation perplexity of all runs over their steps, tokens or training time, in one panel."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.report.figures.loss_curves import Line, LossCurve, Panel, Quantity, draw_curves, mean_line, names_of
from depthlm.report.figures.style import mechanism_of
from depthlm.report.sweep import Sweep
from depthlm.runs.records import RunRecord, Validation, perplexity

# the longest training time, in seconds, that is shown in each unit
UNITS = {"seconds": 600.0, "minutes": 4 * 3600.0, "hours": math.inf}
SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
NOTE = "Points: the validations, each the perplexity of the mean loss over the validation sets."


def draw_validation_curves(sweep: Sweep, over: str, path: Path) -> list[str] | None:
    """Draw the perplexity of all rows over `steps`, `tokens` or `time`; None where no run has any. Returns notes."""
    curves = [
        LossCurve(name, mechanism_of(row.points[0]), row.runs)
        for row, name in zip(sweep.rows, names_of(sweep.rows), strict=True)
    ]
    quantity = _quantity(over, sweep.runs)
    return draw_curves([Panel("", curves)], quantity, path, sweep.stamp(), sweep.experiment.title)


def _quantity(over: str, runs: list[RunRecord]) -> Quantity:
    longest = max((validation.seconds or 0.0 for run in runs for validation in run.validations), default=0.0)
    unit = next(unit for unit, most in UNITS.items() if longest <= most)

    def place(validation: Validation) -> float | None:
        if over == "time":
            return None if validation.seconds is None else validation.seconds / SECONDS[unit]
        return validation.step if over == "steps" else validation.tokens

    def read(run: RunRecord) -> Line:
        places = [(place(validation), perplexity(validation.loss)) for validation in run.validations]
        points = [(x, math.nan if y is None else y) for x, y in places if x is not None]
        return Line(np.array([x for x, _ in points], float), np.array([y for _, y in points], float))

    title = f"training time ({unit})" if over == "time" else over
    return Quantity(read, title, "validation perplexity", NOTE, mean_points, marker="o", counts=over != "time")


def mean_points(lines: Sequence[Line]) -> tuple[Line, Any]:
    """Return the means of the first, second, ... validations of runs, which may take place at different times.

    Also returns their perplexities, [lines, validations]. Runs with different numbers of validations are interpolated.
    """
    if len({len(line.x) for line in lines}) > 1:
        return mean_line(lines)
    perplexities = np.array([line.y for line in lines])
    return Line(np.mean([line.x for line in lines], axis=0), perplexities.mean(axis=0)), perplexities
