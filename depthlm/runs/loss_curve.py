"""Plot the loss curve of a run."""

from pathlib import Path

from depthlm.files import read_yaml
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import ValidationLosses, finite, loss_key, read_metrics, training_loss


def plot_loss(directory: Path, unigram_entropy: float | None = None, to: Path | None = None) -> Path:
    """Plot training and validation loss over tokens from metrics.jsonl of a run directory.

    to: the picture; None: loss.png in the run directory. Returns its path.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = list(read_metrics(RunDirectory(directory).metrics, {"step", "loss", "tokens"}))
    names = sorted({name for row in rows for name in ValidationLosses.of_row(row).by_set})
    # matplotlib's constrained layout draws everything twice; only a legend beside the axes needs it
    legend_outside = len(names) > 5
    figure = Figure(figsize=(7, 4.2), layout="constrained" if legend_outside else None)
    axes = figure.subplots()
    seen = [row for row in rows if row["tokens"] is not None]
    losses = [(row["tokens"] / 1e6, loss) for row in seen if (loss := training_loss(row)) is not None]
    axes.plot([x for x, _ in losses], [loss for _, loss in losses], label="training", lw=1.5)
    # the usual ten colours, one of which is the training loss, would repeat
    colours = matplotlib.colormaps["tab20" if len(names) > 9 else "tab10"]
    for number, name in enumerate(names, 1):
        key = loss_key(name)
        measured = [row for row in seen if finite(row.get(key)) is not None]
        x, y = [row["tokens"] / 1e6 for row in measured], [row[key] for row in measured]
        axes.plot(x, y, "o-", ms=4, lw=1, color=colours(number % colours.N), label=f"validation/{name}")
        # with more curves, the numbers would overlap
        if measured and len(names) <= 2:
            axes.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), textcoords="offset points", xytext=(7, -3))
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="grey", ls=":", label="unigram entropy of the corpus")
    axes.set(
        xlabel="tokens (millions)",
        ylabel="loss (nats per token)",
        title=title_of(directory).replace("$", r"\$"),
    )
    axes.grid(alpha=0.25)
    axes.margins(x=0.11)
    if legend_outside:
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.legend(frameon=False)
    path = RunDirectory(directory).loss_curve if to is None else to
    figure.savefig(path, dpi=130)
    return path


def title_of(directory: Path) -> str:
    """Return the mechanism and the size of a run, as in `depth_attention, nano_60k`, from its config.yaml.

    Where the file does not name them, the end of the directory's path is returned.
    """
    config = read_yaml(RunDirectory(directory).config)
    parts = [config.get(group) for group in ("model", "size")]
    names = [part["name"] for part in parts if isinstance(part, dict) and isinstance(part.get("name"), str)]
    return ", ".join(names) if len(names) == 2 else f"{directory.parent.name}/{directory.name}"[-80:]
