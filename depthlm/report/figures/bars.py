"""A bar chart of the rows: differences against the baseline, ours next to the paper's."""

from pathlib import Path

from depthlm.report.figures.stamp import stamp_of
from depthlm.report.figures.style import grid, save, short, subplots
from depthlm.report.mechanism import mechanism_of
from depthlm.report.rows import paper_difference
from depthlm.report.series import differences, reference_of
from depthlm.report.sweep import Sweep, title_of
from depthlm.report.tables import signed_text

HEIGHT = 0.36


def draw_bars(sweep: Sweep, path: Path) -> list[str] | None:
    """Draw the first column of each row as a difference against the baseline's; None where there is none to draw.

    Returns the notes on the figure.
    """
    from matplotlib.patches import Patch

    name, column = sweep.first
    entries = []
    for row, ours in zip(sweep.rows, differences(sweep.rows, sweep.experiment, column), strict=True):
        reference = reference_of(row, sweep.rows, sweep.experiment)
        if reference is not None and reference is not row:
            entries.append((row, ours, paper_difference(row, reference, name), reference))
    if not any(ours is not None or theirs is not None for _, ours, theirs, _ in entries):
        return None
    both = any(theirs is not None for _, _, theirs, _ in entries)
    figure, ((axes,),) = subplots(1, 8, 1.6 + (0.62 if both else 0.42) * len(entries))
    for number, (row, ours, theirs, _) in enumerate(entries):
        colour = mechanism_of(row).colour
        place = number - HEIGHT / 2 if both else number
        if ours is None:
            axes.annotate(
                "missing", (0, place), xytext=(4, 0), textcoords="offset points", va="center", color="grey", size=8
            )
        else:
            axes.barh(place, ours.mean, HEIGHT, color=colour, xerr=ours.interval, capsize=3, ecolor="black")
            _label(axes, ours.mean, place, column.digits, ours.interval or 0)
        if theirs is not None:
            axes.barh(number + HEIGHT / 2, theirs, HEIGHT, color="white", edgecolor=colour, hatch="////", lw=1.2)
            _label(axes, theirs, number + HEIGHT / 2, column.digits, 0)
    axes.axvline(0, color="black", lw=1)
    axes.set_yticks(range(len(entries)), [short(row.label, 36) for row, *_ in entries])
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.margins(x=0.16)
    references = {reference.label for *_, reference in entries}
    against = references.pop() if len(references) == 1 else "the baseline of the same task"
    axes.set_xlabel(f"{title_of(name, column)}: difference against {against} ({column.better} is better)")
    grid(axes, "x")
    if both:
        shown = [
            Patch(facecolor="#777777", label="ours"),
            Patch(facecolor="white", edgecolor="#777777", hatch="////", label="the paper's"),
        ]
        axes.legend(handles=shown, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    save(figure, path, stamp_of(sweep, beside_paper=both))
    spread = any(ours is not None and ours.interval is not None for _, ours, _, _ in entries)
    return ["Error bars: 95% intervals over seeds, of differences paired by seed."] if spread else []


def _label(axes: object, value: float, place: float, digits: int, beyond: float) -> None:
    right = value >= 0
    axes.annotate(  # type: ignore[attr-defined]
        signed_text(value, digits),
        (value + beyond if right else value - beyond, place),
        xytext=(4 if right else -4, 0),
        textcoords="offset points",
        va="center",
        ha="left" if right else "right",
        size=8,
    )
