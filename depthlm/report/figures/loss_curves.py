"""The loss curves of many runs in one figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from depthlm.counts import count_text
from depthlm.report.figures.style import Look, grid, save, short, subplots
from depthlm.runs.records import COMPLETE, RunRecord
from depthlm.runs.validation_losses import ValidationLosses, finite

# SMOOTHED: the share of a run's logged steps in the running mean. START: the share of the longest run whose losses may
# exceed the y axis. LATE: the share of the longest run at which the second panel begins.
SMOOTHED, START, LATE = 0.02, 0.05, 0.6
MOST_NAMED = 24


@dataclass(frozen=True)
class Trace:
    """A run to draw. mechanism: shared by the runs of one colour."""

    name: str
    mechanism: str
    look: Look
    run: RunRecord


@dataclass(frozen=True)
class Drawn:
    """Tokens and training loss of the logged steps, nan for gaps; tokens and loss of the validations."""

    trace: Trace
    tokens: Any
    loss: Any
    validated: Any
    validation: Any


def draw_loss_curves(traces: Sequence[Trace], path: Path) -> list[str] | None:
    """Draw training losses, lightly smoothed, and validation losses over tokens; None where no run has any.

    Returns the notes on the figure.
    """
    drawn = [read(trace) for trace in traces]
    drawn = [entry for entry in drawn if np.isfinite(entry.loss).any()]
    if not drawn:
        return None
    named = len(drawn) <= MOST_NAMED
    figure, ((whole, late),) = subplots(2, 13, max(4.8, 1 + 0.2 * len(drawn) if named else 0))
    longest = max(float(entry.tokens[-1]) for entry in drawn)
    _draw(whole, drawn, START * longest, named)
    _draw(late, drawn, LATE * longest, named)
    whole.set(title="training loss (lines) and validation loss (dots)", xlim=(0, None))
    late.set(title="the same, the end of the longest run", xlim=(LATE * longest, longest * 1.02))
    handles, labels = whole.get_legend_handles_labels()
    if not named:
        # one legend entry per mechanism
        labels = [entry.trace.mechanism for entry in drawn]
        handles = [handles[labels.index(label)] for label in dict.fromkeys(labels)]
        labels = list(dict.fromkeys(labels))
    figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside right center")
    save(figure, path)
    notes = [f"Training loss is a running mean over {SMOOTHED:.0%} of a run's logged steps."]
    if any(entry.trace.run.state != COMPLETE for entry in drawn):
        notes.append("Pale lines that end in a cross are incomplete runs.")
    if not named:
        notes.append(f"{len(drawn)} runs are too many to name individually.")
    return notes


def read(trace: Trace) -> Drawn:
    """Return the losses of a run, from its valid rows."""
    rows = [row for row in trace.run.rows if finite(row.get("tokens")) is not None]
    losses = [finite(row.get("loss")) for row in rows]
    means = [ValidationLosses.of_row(row).mean for row in rows]
    return Drawn(
        trace,
        np.array([row["tokens"] for row in rows], float),
        smooth(np.array([np.nan if loss is None else loss for loss in losses], float)),
        np.array([row["tokens"] for row, mean in zip(rows, means, strict=True) if mean is not None], float),
        np.array([mean for mean in means if mean is not None], float),
    )


def smooth(loss: Any) -> Any:
    """Return the centred mean over a share SMOOTHED of the rows, over fewer at the ends; gaps remain gaps."""
    width = int(SMOOTHED * len(loss)) // 2
    if width == 0:
        return loss
    valid = np.isfinite(loss)
    window = np.ones(2 * width + 1)
    total = np.convolve(np.where(valid, loss, 0.0), window, "same")
    count = np.convolve(valid.astype(float), window, "same")
    return np.where(valid, total / np.maximum(count, 1), np.nan)


def _draw(axes: Any, drawn: Sequence[Drawn], begin: float, named: bool) -> None:
    """Draw all runs, with a range of losses that includes every loss after `begin` tokens."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    width = 1.5 if len(drawn) <= 8 else 1.0 if named else 0.6
    for entry in drawn:
        run, colour = entry.trace.run, entry.trace.look.colour
        faded = run.state != COMPLETE
        label = f"{short(entry.trace.name, 60)}{f' ({run.state}, step {run.step:,})' if faded else ''}"
        dash = entry.trace.look.dash if named else "-"
        axes.plot(entry.tokens, entry.loss, label=label, alpha=0.5 if faded else 0.95, color=colour, ls=dash, lw=width)
        if faded:
            end = np.flatnonzero(np.isfinite(entry.loss))[-1]
            axes.plot(entry.tokens[end], entry.loss[end], "x", color=colour, ms=8, mew=2)
        axes.plot(entry.validated, entry.validation, "o", color=colour, ms=5 if named else 2.5, mec="white", mew=0.5)
    shown = [entry.loss[(entry.tokens >= begin) & np.isfinite(entry.loss)] for entry in drawn]
    shown += [entry.validation[entry.validated >= begin] for entry in drawn]
    values = np.concatenate(shown)
    if values.size:
        margin = 0.05 * (values.max() - values.min()) or 0.1
        axes.set_ylim(values.min() - margin, values.max() + margin)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    grid(axes)
