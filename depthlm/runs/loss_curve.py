"""Plot the loss curve of a run."""

from pathlib import Path

import depthlm
from depthlm.counts import count_text
from depthlm.files import read_yaml
from depthlm.run_directory import RunDirectory
from depthlm.runs.plots import HUES, grid, save, short, subplots
from depthlm.runs.records import ValidationLosses, finite, interval_losses, loss_key, read_metrics

# with more validation sets, the legend is beside the axes, and the numbers at the ends of the curves would overlap
LEGEND_INSIDE, NUMBERED = 5, 2


def plot_loss(directory: Path, unigram_entropy: float | None = None, to: Path | None = None) -> Path:
    """Plot training and validation loss over tokens from metrics.jsonl of a run directory.

    to: the picture; None: loss.png in the run directory. Returns its path.
    """
    import matplotlib
    from matplotlib.ticker import FuncFormatter

    rows = list(read_metrics(RunDirectory(directory).metrics, {"step", "loss", "tokens"}))
    names = sorted({name for row in rows for name in ValidationLosses.of_row(row).by_set})
    figure, ((axes,),) = subplots(1, 7, 4.2)
    losses = [(tokens, loss) for tokens, loss in interval_losses(rows) if loss is not None]
    axes.plot(*zip(*losses, strict=True) if losses else ([], []), color="#555555", lw=1.3, label="training")
    colours = HUES if len(names) <= len(HUES) else [matplotlib.colormaps["tab20"](number) for number in range(20)]
    for number, name in enumerate(names):
        key = loss_key(name)
        measured = [row for row in rows if row["tokens"] is not None and finite(row.get(key)) is not None]
        x, y = [row["tokens"] for row in measured], [row[key] for row in measured]
        axes.plot(x, y, "o-", ms=4, lw=1.3, color=colours[number % len(colours)], label=f"validation/{name}")
        if measured and len(names) <= NUMBERED:
            axes.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), textcoords="offset points", xytext=(7, -3), size=9)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="grey", ls=":", label="unigram entropy of the corpus")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axes.margins(x=0.11)
    grid(axes)
    if len(names) > LEGEND_INSIDE:
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.legend(frameon=False)
    path = RunDirectory(directory).loss_curve if to is None else to
    save(figure, path, _stamp(directory, rows[-1]["tokens"] if rows else None), title_of(directory))
    return path


def title_of(directory: Path) -> str:
    """Return the mechanism and the size of a run, as in `depth_attention, nano_60k`, from its config.yaml.

    Where the file does not name them, the end of the directory's path is returned.
    """
    config = read_yaml(RunDirectory(directory).config)
    parts = [config.get(group) for group in ("model", "size")]
    names = [part["name"] for part in parts if isinstance(part, dict) and isinstance(part.get("name"), str)]
    return ", ".join(names) if len(names) == 2 else f"{directory.parent.name}/{directory.name}"[-80:]


def _stamp(directory: Path, tokens: float | None) -> str:
    seed = read_yaml(RunDirectory(directory).config).get("seed")
    texts = [
        "" if tokens is None else f"{count_text(tokens)} tokens",
        "" if seed is None else short(f"seed {seed}"),
        f"depthlm {depthlm.__version__}",
        "training: the mean over each interval of steps, drawn at its middle",
    ]
    return ", ".join(filter(None, texts))
