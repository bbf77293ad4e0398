"""The pictures of docs/results, but that of the scaling laws: differences, slopes, rates and interventions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from depthlm.report.figures.style import Style, mechanism_of, shade, style_of
from depthlm.report.rows import Row, measure_column
from depthlm.report.sweep import Sweep
from depthlm.runs.plots import MARKERS, grid, legend_below, save, subplots
from depthlm.sweeps.point import Point
from docs.results.analysis import completep
from docs.results.analysis.depth import (
    EQUAL,
    GROUPS,
    LEARNED,
    STATIC,
    Study,
    choices,
    equal_weights,
    group_gaps,
    groups_without,
    pooled_group,
    slope,
)
from docs.results.analysis.differences import with_interval
from docs.results.analysis.interventions import COSTS

BARS = "error bars: 95% intervals, with the luck of the choices, without a correction for their number"
# of the losses at other rates than the best one
HIGHEST = 0.2
# of the differences from vanilla, in both directions
FARTHEST = 0.2


def draw_differences(study: Study, path: Path, stamp: str) -> None:
    """Draw the difference of each mechanism from vanilla over the layers, a panel per group, with the group's mean.

    Mechanisms with runs that may have failed have no intervals, and no part in the mean.
    """
    figure, axes = subplots(2, 11.5, 5.2, sharey=True)
    failing, looks = study.failing(), styles()
    for panel, (group, models) in zip(axes[0], GROUPS.items(), strict=True):
        for number, model in enumerate(models):
            shift, style = 1 + 0.035 * (number - (len(models) - 1) / 2), looks[model]
            look = {"color": style.colour, "marker": style.marker, "lw": 1, "ms": 5, "capsize": 2, "alpha": 0.8}
            if model in failing:
                means = [number.mean for number in pooled_group(study, [model])]
                look.pop("capsize")
                panel.plot([n * shift for n in study.layers], means, ls=":", label=f"{model} (failed)", **look)
            else:
                draw_over_layers(panel, study, [model], shift, model, look | {"ls": style.dash})
        kept = [model for model in models if model not in failing]
        label = "mean of the group" if len(kept) == len(models) else "mean without the failed"
        draw_over_layers(panel, study, kept, 1.0, label, {"color": "0.15", "marker": "", "lw": 2.6, "capsize": 4})
        panel.axhline(0, color="0.3", lw=1.3)
        panel.set_xscale("log", base=2)
        panel.set_xticks(study.layers, [str(layers) for layers in study.layers])
        panel.minorticks_off()
        panel.set_xlabel("layers")
        panel.set_title(f"{group} reads", fontsize="medium")
        grid(panel)
    axes[0, 0].set_ylabel("validation loss - vanilla's, nats per token")
    axes[0, 0].set_ylim(-FARTHEST, FARTHEST)
    legend_below(figure, axes.flat)
    means = {
        f"{model} with {layers} layers": number.mean
        for model in (*LEARNED, *STATIC)
        for layers, number in zip(study.layers, pooled_group(study, [model]), strict=True)
    }
    far = [f"{label} ({mean:+.2f})" for label, mean in means.items() if abs(mean) > FARTHEST]
    beyond = f"\nbeyond the picture: {', '.join(far)}" if far else ""
    save(figure, path, f"{stamp}; below 0: better than vanilla; {BARS}{beyond}")


def draw_over_layers(
    panel: Any, study: Study, models: Sequence[str], shift: float, label: str, look: Mapping[str, Any]
) -> None:
    """Draw the mean gap of some mechanisms at each number of layers, with intervals. shift: factor of the places."""
    numbers = [with_interval(number) for number in pooled_group(study, models)]
    arms = [[arm for number in numbers for arm in number.arms[side]] for side in (0, 1)]
    panel.errorbar([n * shift for n in study.layers], [n.mean for n in numbers], arms, label=label, **look)


def draw_slopes(study: Study, path: Path, stamp: str) -> None:
    """Draw the slope of each mechanism and of the two groups, in vanilla's shape and at equal parameters.

    Without mechanisms with runs that may have failed, and those whose slopes are beyond the picture.
    """
    rows: dict[str, Sequence[str]] = {}
    failing, looks = study.failing(), styles()
    for group, members in groups_without(*failing).items():
        rows |= {model: [model] for model in members}
        gone = ", ".join(model for model in GROUPS[group] if model not in members)
        rows[f"mean of {group} reads{f' without {gone}' if gone else ''}"] = members
    figure, axes = subplots(1, 8.4, 6.0)
    panel = axes[0, 0]
    for equal, offset, fill in ((False, -0.16, "full"), (True, 0.16, "none")):
        label = f"minus vanilla{EQUAL if equal else ''}"
        for place, (name, models) in enumerate(rows.items()):
            luck = study.luck_of(equal_weights(models), equal)
            number, of_group = slope(group_gaps(study, models, equal), luck=luck), len(models) > 1
            look = {"color": "0.15" if of_group else looks[name].colour, "fillstyle": fill, "ms": 8 if of_group else 6}
            marker = "D" if of_group else "o"
            panel.errorbar([number.mean], [place + offset], None, number.arms, marker=marker, capsize=3, **look)
        panel.plot([], [], "o", ls="", color="0.3", fillstyle=fill, label=label)
    panel.axvline(0, color="0.3", lw=1.3)
    panel.set_yticks(range(len(rows)), [*rows])
    panel.invert_yaxis()
    panel.set_xlabel("change of the difference from vanilla per doubling of the depth, nats per token")
    legend_below(figure, [panel])
    grid(panel)
    failed = ", ".join(f"{model} ({slope(study.gaps(model)).mean:+.2f})" for model in failing)
    left_out = f"; without {failed}, which failed" if failing else ""
    save(figure, path, f"{stamp}; below 0: gains with depth{left_out}\n{BARS}")


def draw_choices(sweep: Sweep, path: Path) -> None:
    """Draw the loss of the runs that choose over the learning rate, a panel per mechanism and a line per depth."""
    groups = {key: group for key, group in choices(sweep).items() if key[1].endswith("layers")}
    models, tasks = (list(dict.fromkeys(key[place] for key in groups)) for place in (0, 1))
    across = -(-len(models) // 2)
    figure, axes = subplots(across, 2.1 * across + 0.6, 5.4, rows=2, sharex=True, sharey=True)
    for panel, model in zip(axes.flat, models, strict=False):
        for number, task in enumerate(tasks):
            group = groups[model, task]
            losses = {float(value): measure_column(row, group.column).mean for value, row in group.grid.items()}
            rates, best = sorted(losses), min(losses.values())
            look = {"color": shade("#0072B2", 0.6 - 0.4 * number), "marker": MARKERS[number], "ms": 4, "lw": 1.3}
            panel.plot(rates, [losses[rate] - best for rate in rates], label=task, **look)
        panel.set_xscale("log")
        panel.set_title(model, fontsize="small")
        grid(panel)
    tried = sorted({float(value) for group in groups.values() for value in group.grid})
    axes[0, 0].set_xticks(tried, [f"{1000 * rate:g}" for rate in tried])
    axes[0, 0].minorticks_off()
    axes[0, 0].set_ylim(-0.01, HIGHEST)
    for panel in axes.flat[len(models) :]:
        panel.set_visible(False)
    axes[1, across // 2].set_xlabel("peak learning rate, in thousandths")
    figure.supylabel("validation loss - that of the best rate", fontsize="medium")
    legend_below(figure, axes.flat)
    save(figure, path, f"experiment=depthlm/depth, the seed that chooses; differences above {HIGHEST} are cut off")


def draw_interventions(results: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, stamp: str) -> None:
    """Draw the rank correlation of weight and use, and what fewer sources or fixed weights cost, by mechanism."""
    figure, axes = subplots(2, 11.5, 4.8, sharey=True)
    looks = {
        name: {"marker": "x" if name == "means" else "o", "ms": 4 + 1.5 * number, "fillstyle": "none"}
        for number, name in enumerate(COSTS)
    }
    colours = styles()
    for place, (model, lines) in enumerate(results.items()):
        colour = colours[model].colour
        ranks = [line["rank"] for line in lines if line.get("rank") is not None]
        if ranks:
            axes[0, 0].plot(ranks, [place] * len(ranks), "o", color=colour, alpha=0.5)
            axes[0, 0].plot([fmean(ranks)], [place], "|", color=colour, ms=16, mew=2.5)
        for number, name in enumerate(COSTS):
            costs = [line[name] - line["loss"] for line in lines if name in line]
            if costs:
                y = place + 0.2 * (number - 1.5)
                axes[0, 1].plot([min(costs), max(costs)], [y, y], color=colour, lw=1)
                axes[0, 1].plot([fmean(costs)], [y], color=colour, ls="", **looks[name])
    titles = (
        "rank correlation of |weight| and the loss added without the edge",
        "added loss, nats per token (linear below 0.001)",
    )
    for panel, title in zip(axes[0], titles, strict=True):
        panel.axvline(0, color="0.3", lw=1.3)
        panel.set_xlabel(title)
        grid(panel)
    axes[0, 1].set_xscale("symlog", linthresh=1e-3)
    axes[0, 0].set_yticks(range(len(results)), list(results))
    axes[0, 0].invert_yaxis()
    for name, text in COSTS.items():
        axes[0, 1].plot([], [], color="0.3", ls="", label=text, **looks[name])
    legend_below(figure, axes.flat)
    note = "correlation: points are seeds, bars are means; added loss: markers are means, lines the range over seeds"
    save(figure, path, f"{stamp}; {note}")


def draw_completep(study: completep.Study, path: Path, stamp: str) -> None:
    """Draw the difference of each mechanism from vanilla with both parametrizations, means over the depths.

    Mechanisms whose runs are not complete have no row.
    """
    arms = {name: arm for name in (*completep.MECHANISMS, "control") if (arm := study.compare(name)) is not None}
    figure, axes = subplots(1, 8.4, 1.4 + 0.55 * len(arms))
    panel, looks = axes[0, 0], styles()
    for label, offset, fill in zip(completep.LABELS, (-0.14, 0.14), ("full", "none"), strict=True):
        for place, (name, arm) in enumerate(arms.items()):
            number = with_interval(arm.gap(label))
            colour = "0.4" if name == "control" else looks[name].colour
            look = {"marker": "o", "color": colour, "fillstyle": fill, "ms": 7, "capsize": 3}
            panel.errorbar([number.mean], [place + offset], None, number.arms, **look)
        panel.plot([], [], "o", ls="", color="0.3", fillstyle=fill, label=f"both with {label}")
    panel.axvline(0, color="0.3", lw=1.3)
    panel.set_yticks(range(len(arms)), [f"{name}: vanilla" if name == "control" else name for name in arms])
    panel.set_ylim(len(arms) - 0.5, -0.5)
    panel.set_xlabel(
        f"validation loss - vanilla's, nats per token, mean of {' and '.join(map(str, completep.LAYERS))} layers"
    )
    legend_below(figure, [panel])
    grid(panel)
    save(figure, path, f"{stamp}; below 0: better than vanilla\n{BARS}; the control has no luck")


def styles() -> dict[str, Style]:
    """Return the style of each mechanism of the study, of which no two have nearly the same colour."""
    models = (*LEARNED, *STATIC)
    mechanisms = [mechanism_of(Row([Point([f"model={model}"], {"model": model})], [], {})) for model in models]
    return dict(zip(models, style_of(mechanisms), strict=True))
