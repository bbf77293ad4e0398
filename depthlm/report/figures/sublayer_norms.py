"""The size of each sublayer's output and of its gradient over depth, for all runs at the end of their training."""

from pathlib import Path
from typing import Any

import numpy as np

from depthlm.report.figures.loss_curves import named_rows
from depthlm.report.figures.style import mechanism_of, style_of
from depthlm.report.sweep import Sweep
from depthlm.run_directory import RunDirectory
from depthlm.runs.plots import grid, legend_below, save, subplots
from depthlm.runs.records import RunRecord, read_metrics

QUANTITIES = {"output": "output, root mean square", "gradient": "gradient, root mean square"}
KINDS = ("attention", "mlp")


def draw_sublayer_norms(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw the last measurement of `training.log_blocks_every` of each row, as in Figure 5 of Attention Residuals.

    None where no run has any. Returns notes on the figure.
    """
    measured = {
        name: (row, arrays)
        for name, row in named_rows(sweep.rows).items()
        if (arrays := [array for run in row.runs if (array := last_norms(run)) is not None])
    }
    if not measured:
        return None
    figure, axes = subplots(2, 10.5, 4.2)
    styles = style_of([mechanism_of(row) for row, _ in measured.values()])
    for place, (number, title) in zip(axes.flat, enumerate(QUANTITIES.values()), strict=True):
        for (name, (_, arrays)), style in zip(measured.items(), styles, strict=True):
            # runs of a row have one depth
            values = np.mean([array[number] for array in arrays], axis=0)
            place.plot(np.arange(1, len(values) + 1), values, label=name, color=style.colour, ls=style.dash, marker=".")
        place.set_yscale("log")
        place.set_xlabel("sublayer")
        place.set_ylabel(title)
        place.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        grid(place)
    legend_below(figure, axes.flat)
    save(figure, path, sweep.stamp(), sweep.experiment.title)
    return [
        "The output of each sublayer as it is written to the depth stream, and the gradient of the loss there, when "
        "they were last measured (`training.log_blocks_every`). Odd sublayers are attentions, even ones MLPs."
    ]


def last_norms(run: RunRecord) -> Any:
    """Return the last row of blocks.jsonl as an array [quantity, sublayer]; None if there is none."""
    parts = [[f"{kind}_{quantity}" for kind in KINDS] for quantity in QUANTITIES]
    file = RunDirectory(run.directory).sublayer_norms
    rows = list(read_metrics(file, {"step"}, [name for names in parts for name in names]))
    if not rows:
        return None
    # non-finite values are null in the file, and nan here
    return np.array([np.array([rows[-1][name] for name in names], float).T.flatten() for names in parts])
