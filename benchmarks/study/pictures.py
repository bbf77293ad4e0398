"""The five pictures of docs/results."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.study.differences import Difference, gaps_to_vanilla, paired_difference, rate_changes, values_of
from depthlm.config.experiment import Column
from depthlm.report.figures.loss_curves import draw_loss_curves, panels_of
from depthlm.report.figures.scaling import draw_scaling
from depthlm.report.figures.style import mechanism_of
from depthlm.report.rows import measured, over_seeds
from depthlm.report.scaling_laws import curves, savings
from depthlm.report.sweep import Sweep
from depthlm.report.tables import number_text
from depthlm.runs.plots import grid, legend_below, save, subplots
from depthlm.runs.records import COMPLETE
from depthlm.sweeps.point import Point

PICTURES = ("start.png", "rates.png", "loss_curves.png", "scaling.png", "sensitivity.png")
SENSITIVITY = {
    "sensitivity_depth": ("size.num_layers", "layers, at equal parameters outside the embedding"),
    "sensitivity_embedding": ("size.embedding_init_std", "initial standard deviation of the embedding"),
    "sensitivity_rate": ("optimizer.lr", "peak learning rate"),
    "sensitivity_rate_dca": ("optimizer.lr", "peak learning rate"),
}


def draw_all(sweeps: Mapping[str, Sweep], views: Mapping[str, Column], folder: Path) -> None:
    """Draw the pictures of the page into a folder. sweeps: by experiment. views: of the scaling laws."""
    scaling = sweeps["scaling"]
    for name in PICTURES:
        # the picture of other records must not stay
        (folder / name).unlink(missing_ok=True)
    _draw_start(sweeps["start"], folder / "start.png")
    _draw_rates(sweeps["rates"], folder / "rates.png")
    draw_loss_curves(panels_of(scaling), folder / "loss_curves.png", scaling.stamp())
    fitted = curves(scaling, views)
    draw_scaling(scaling, fitted, savings(scaling, fitted), folder / "scaling.png", views)
    _draw_sensitivity(sweeps, folder / "sensitivity.png")


def _draw_start(sweep: Sweep, path: Path) -> None:
    """Draw vanilla's loss over the embedding's initial deviation, a line per that of the matrices, a panel per size."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for size in values_of(sweep, "size"):
        rows = [row for row in sweep.rows if row.settings["size"] == size]
        for std in dict.fromkeys(row.settings["size.init_std"] for row in rows):
            drawn_rows = [row for row in rows if row.settings["size.init_std"] == std]
            points = []
            for start in dict.fromkeys(row.settings["size.embedding_init_std"] for row in drawn_rows):
                tried = [row for row in drawn_rows if row.settings["size.embedding_init_std"] == start]
                if numbers := [number.mean for row in tried if (number := measured(row, sweep.first[1]))]:
                    points.append((float(start), min(numbers)))
            if points:
                groups.setdefault(size, {})[std] = sorted(points)
    # a panel needs more than one initialization of the embedding
    groups = {size: lines for size, lines in groups.items() if any(len(points) > 1 for points in lines.values())}
    if not groups:
        return
    figure, axes = subplots(len(groups), 5.2 * len(groups), 4.2)
    colours = {std: f"C{number}" for number, std in enumerate(values_of(sweep, "size.init_std"))}
    for panel, (size, lines) in zip(axes[0], groups.items(), strict=True):
        for std, points in lines.items():
            panel.plot(
                *zip(*points, strict=True),
                "o-",
                color=colours[std],
                label=f"initial standard deviation of matrices: {std}",
            )
        panel.set(xscale="log", xlabel="initial standard deviation of the embedding", ylabel="validation loss")
        drawn = sorted({start for points in lines.values() for start, _ in points})
        panel.set_xticks(drawn, [f"{start:g}" for start in drawn])
        panel.minorticks_off()
        panel.set_title(f"vanilla, {size}, at the best rate tried", fontsize="medium")
        panel.legend(frameon=False, fontsize="small")
        grid(panel)
    shown = replace(sweep, rows=[row for row in sweep.rows if row.settings["size"] in groups])
    save(figure, path, shown.stamp())


def _draw_rates(sweep: Sweep, path: Path) -> None:
    """Draw how the loss of each mechanism differs at other learning rates than that of the study."""
    rate, others, changes = rate_changes(sweep)
    if not any(change is not None for by_rate in changes.values() for change in by_rate):
        return
    figure, axes = subplots(1, 8, 4.8)
    panel = axes[0, 0]
    for number, (other, marker) in enumerate(zip(others, "os", strict=True)):
        look = {"marker": marker, "ls": "", "fillstyle": "none" if number else "full"}
        for place, (model, by_rate) in enumerate(changes.items()):
            if (change := by_rate[number]) is not None:
                y = place - 0.12 + 0.24 * number
                colour = mechanism_of(Point([], {"model": model})).colour
                panel.errorbar([change.mean], [y], None, change.arms, capsize=3, color=colour, **look)
        panel.plot([], [], color="0.3", label=f"at {other}", **look)
    panel.axvline(0, color="0.3", lw=1.3)
    panel.set_yticks(range(len(changes)), list(changes))
    panel.invert_yaxis()
    panel.set(xlabel=f"change of the validation loss from that at {rate} (right of 0: worse)")
    size = sweep.configs[0].size.name
    panel.set_title(f"Change of the loss at half and at twice the learning rate, {size}", fontsize="medium")
    panel.legend(frameon=False, fontsize="small")
    grid(panel)
    save(figure, path, f"{sweep.stamp()}; error bars: 95% intervals, paired by seed, without a correction")


def _draw_sensitivity(sweeps: Mapping[str, Sweep], path: Path) -> None:
    """Draw the differences against vanilla over each setting that the study varies."""
    if not any(run.state == COMPLETE for experiment in SENSITIVITY for run in sweeps[experiment].runs):
        return
    figure, axes = subplots(2, 11, 8.6, rows=2)
    for panel, (experiment, (key, title)) in zip(axes.flat, SENSITIVITY.items(), strict=True):
        sweep = sweeps[experiment]
        values = values_of(sweep, key)
        ticks = []
        for place, value in enumerate(values):
            gaps = gaps_to_vanilla(sweep, key, value)
            vanilla = over_seeds(list(gaps.pop("vanilla").values()))
            ticks.append(f"{float(value):g}\n(vanilla: {number_text(None if vanilla is None else vanilla.mean, 3)})")
            for number, (model, gap) in enumerate(gaps.items()):
                if (difference := paired_difference(gap, 0.95)) is not None:
                    _draw_difference(panel, place + 0.06 * number, difference, model)
        panel.set_xlim(-0.4, len(values) - 0.6)
        panel.axhline(0, color="0.3", lw=1.3)
        panel.set(xlabel=title, ylabel="validation loss - vanilla's")
        panel.set_xticks(range(len(values)), ticks)
        size = f"{'those of ' if key == 'size.num_layers' else ''}{sweep.configs[0].size.name}"
        panel.set_title(f"{sweep.experiment.title} ({size})\n{sweep.stamp()}", fontsize="medium")
        grid(panel)
    legend_below(figure, axes.flat)
    bars = "error bars: 95% intervals of differences paired by seed, without a correction"
    save(figure, path, f"below 0: better than vanilla; {bars}; scales differ")


def _draw_difference(panel: Any, place: float, number: Difference, model: str) -> None:
    shown = panel.get_legend_handles_labels()[1]
    label = None if model in shown else model
    style = {
        "color": mechanism_of(Point([], {"model": model})).colour,
        "marker": "o",
        "ls": "",
        "capsize": 3,
        "label": label,
    }
    panel.errorbar([place], [number.mean], number.arms, **style)
