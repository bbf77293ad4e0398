"""The tables and pictures of docs/results/transfer.md: the coordinate check, and rates over width and depth."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.reporting import FOLDER
from depthlm.config.experiment import VALIDATION_LOSS
from depthlm.report.figures.style import shade
from depthlm.report.rows import Row, measure_column
from depthlm.report.tables import DASH, Cell, Table, cells, markdown, number_text
from depthlm.runs.plots import MARKERS, grid, save, subplots
from docs.results.analysis.archive import RESULTS
from docs.results.analysis.coordinate_check import draw

PAGE = RESULTS / "transfer.md"
COORDINATES = FOLDER / "coordinate-check-xeon-2-cores.json"
BASE, LABELS = "base size", ("standard", "CompleteP")
TASKS = (BASE, "width x 2", "width x 4", "depth x 2", "depth x 4")


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of the page, as Markdown, by the names of their blocks."""
    return {"coordinates": markdown(coordinates()), "rates_over_shapes": markdown(rates(rows))}


def draw_all(rows: Sequence[Row], folder: Path) -> None:
    """Draw the pictures of the page into a folder."""
    draw(json.loads(COORDINATES.read_text()), "vanilla", folder / "coordinate_check.png")
    draw_rates(rows, folder / "transfer.png")


def coordinates() -> Table:
    """Return by what factor the changes of each mechanism grow from the base size to the largest width and depth."""
    checked, rows = json.loads(COORDINATES.read_text()), []
    for model, by_axis in checked["changes"].items():
        curves = [by_axis[axis][name] for axis in ("width", "depth") for name in ("standard", "completep")]
        texts = (
            ", ".join(f"{last[part] / first[part]:.2f}" for part in ("outputs", "hidden")) for first, *_, last in curves
        )
        rows.append(cells([model, *texts]))
    head = [f"{axis} x {checked['factors'][axis][-1]}, {name}" for axis in ("width", "depth") for name in LABELS]
    return Table(["outputs, hidden state", *head], rows)


def losses(rows: Sequence[Row], model: str, label: str, task: str) -> dict[str, float]:
    """Return the loss of each learning rate; at the base size, CompleteP is the standard parametrization."""
    wanted = {"label": LABELS[0] if task == BASE else label, "task": task}
    own = [row for row in rows if row.settings["model"] == model and wanted.items() <= row.parts.items()]
    known = {row.settings["optimizer.lr"]: measure_column(row, VALIDATION_LOSS) for row in own}
    return {rate: number.mean for rate, number in known.items() if number is not None}


def rates(rows: Sequence[Row]) -> Table:
    """Return the loss of each mechanism and shape at each learning rate, with the lowest of a line in bold."""
    tried = sorted({row.settings["optimizer.lr"] for row in rows}, key=float)
    models, lines = dict.fromkeys(row.settings["model"] for row in rows), []
    for model, label in [("vanilla", LABELS[0]), *((model, LABELS[1]) for model in models)]:
        for task in TASKS:
            by_rate = losses(rows, model, label, task)
            if not by_rate or (task == BASE and (model, label) == ("vanilla", LABELS[1])):
                continue
            best = min(by_rate, key=lambda rate: by_rate[rate])
            shown = [Cell(number_text(by_rate[r], 3) if r in by_rate else DASH, r == best) for r in tried]
            lines.append([Cell(f"{model}, {label if task != BASE else 'both'}, {task}"), *shown])
    return Table(["validation loss at a rate of", *tried], lines)


def draw_rates(rows: Sequence[Row], path: Path) -> None:
    """Draw the loss over the learning rate of each width and depth, a column of panels per parametrization."""
    figure, axes = subplots(2, 9.0, 6.4, rows=2, sharex=True, sharey="row")
    tried = sorted({float(row.settings["optimizer.lr"]) for row in rows})
    for panels, axis in zip(axes, ("width", "depth"), strict=True):
        for panel, label in zip(panels, LABELS, strict=True):
            for number, task in enumerate(task for task in TASKS if task == BASE or task.startswith(axis)):
                by_rate = losses(rows, "vanilla", label, task)
                points = sorted((float(rate), loss) for rate, loss in by_rate.items())
                x, y = [rate for rate, _ in points], [loss for _, loss in points]
                style = {"color": shade("#0072B2", 0.55 - 0.45 * number), "marker": MARKERS[number]}
                panel.plot(x, y, label=task, **style)
                if points:
                    at, lowest = min(points, key=lambda point: point[1])
                    panel.plot([at], [lowest], "o", ms=13, mfc="none", mec="0.3")
            panel.set_xscale("log")
            panel.set_xticks(tried, [f"{1000 * rate:g}" for rate in tried])
            panel.minorticks_off()
            panel.set_title(f"{label}: {axis}", fontsize="medium")
            panel.legend(frameon=False, fontsize="small")
            grid(panel)
    for panel in axes[-1]:
        panel.set_xlabel("peak learning rate of the base size, in thousandths")
    figure.supylabel("validation loss", fontsize="medium")
    stamp = "experiment=depthlm/transfer, vanilla, base size nano_60k (4 layers, 32 channels), 188K tokens, one seed"
    save(figure, path, f"{stamp}; rings: the lowest loss of a curve")
