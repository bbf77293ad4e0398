"""The five pictures of docs/results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archive import study_sweep

from depthlm.config.schema.experiment import Column
from depthlm.report.figures.lines import draw_lines
from depthlm.report.figures.loss_curves import draw_loss_curves
from depthlm.report.figures.panels import panels_of
from depthlm.report.figures.scaling import draw_scaling
from depthlm.report.figures.stamp import stamp_of
from depthlm.report.figures.style import COLOURS, grid, save, subplots
from depthlm.report.rows import Measured, Row, difference, measured, pooled
from depthlm.report.scaling_laws import curves, savings
from depthlm.report.sweep import Sweep

SENSITIVITY = {
    "sensitivity_embedding": ("size.embedding_init_std", "standard deviation of the embedding at the start"),
    "sensitivity_rate": ("optimizer.lr", "peak learning rate"),
    "sensitivity_depth": ("size.num_layers", "layers, at equal parameters"),
}


def draw_all(scaling: Sweep, views: Mapping[str, Column], folder: Path) -> None:
    """Draw the pictures of the page into a folder."""
    _draw_start(folder / "start.png")
    draw_lines(study_sweep("rates"), folder / "rates.png")
    draw_loss_curves(panels_of(scaling), folder / "loss_curves.png", stamp_of(scaling))
    fitted = curves(scaling, views)
    draw_scaling(scaling, fitted, savings(scaling, fitted), folder / "scaling.png", views)
    _draw_sensitivity(folder / "sensitivity.png")


def best_of(rows: Sequence[Row], column: Column) -> float | None:
    """Return the lowest number of some rows, or None if none has one."""
    return min((number.mean for row in rows if (number := measured(row, column)) is not None), default=None)


def _draw_start(path: Path) -> None:
    """Draw vanilla's loss over the start of the embedding, a line per start of the matrices, a panel per size."""
    sweep = study_sweep("start")
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for size in dict.fromkeys(row.settings["size"] for row in sweep.rows):
        rows = [row for row in sweep.rows if row.settings["size"] == size]
        for std in dict.fromkeys(row.settings["size.init_std"] for row in rows):
            own = [row for row in rows if row.settings["size.init_std"] == std]
            points = []
            for start in dict.fromkeys(row.settings["size.embedding_init_std"] for row in own):
                tried = [row for row in own if row.settings["size.embedding_init_std"] == start]
                if (loss := best_of(tried, sweep.first[1])) is not None:
                    points.append((float(start), loss))
            if len(points) > 1:
                groups.setdefault(size, {})[std] = sorted(points)
    if not groups:
        return
    figure, axes = subplots(len(groups), 5.2 * len(groups), 4.2)
    for panel, (size, lines) in zip(axes[0], groups.items(), strict=True):
        for std, points in lines.items():
            panel.plot(*zip(*points, strict=True), "o-", label=f"matrices: {std}")
        panel.set(xscale="log", xlabel="standard deviation of the embedding", ylabel="validation loss")
        panel.set_title(f"vanilla, {size}, at the best rate tried", fontsize="medium")
        panel.legend(frameon=False, fontsize="small")
        grid(panel)
    save(figure, path, stamp_of(sweep))


def _draw_sensitivity(path: Path) -> None:
    """Draw the differences against vanilla over each setting that the study varies."""
    figure, axes = subplots(len(SENSITIVITY), 15, 4.4)
    for panel, (experiment, (key, title)) in zip(axes[0], SENSITIVITY.items(), strict=True):
        sweep = study_sweep(experiment)
        values = list(dict.fromkeys(row.settings[key] for row in sweep.rows))
        for model in dict.fromkeys(row.settings["model"] for row in sweep.rows):
            if model != "vanilla":
                _draw_differences(panel, _differences(sweep, model, key, values), values, model)
        panel.axhline(0, color=COLOURS["vanilla"], lw=1.3)
        panel.set(xlabel=title, ylabel="validation loss - vanilla's")
        panel.set_xticks(range(len(values)), [f"{float(value):g}" for value in values])
        panel.set_title(f"{sweep.configs[0].size.name}: {sweep.experiment.title.lower()}", fontsize="medium")
        grid(panel)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels) or 1)
    save(figure, path)


def _differences(sweep: Sweep, model: str, key: str, values: Sequence[str]) -> list[tuple[int, Measured]]:
    found = []
    for place, value in enumerate(values):
        rows = {row.settings["model"]: row for row in sweep.rows if row.settings[key] == value}
        number = difference(rows[model], rows["vanilla"], sweep.first[1])
        if number is not None:
            found.append((place, number))
    numbers = pooled([number for _, number in found])
    return [(place, number) for (place, _), number in zip(found, numbers, strict=True)]


def _draw_differences(panel: Any, points: Sequence[tuple[int, Measured]], values: Sequence[str], model: str) -> None:
    if points:
        panel.errorbar(
            [place for place, _ in points],
            [number.mean for _, number in points],
            [number.interval or 0 for _, number in points],
            color=COLOURS[model],
            marker="o",
            capsize=3,
            label=model,
        )
    panel.set_xlim(-0.4, len(values) - 0.6)
