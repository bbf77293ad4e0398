"""`python -m depthlm inspect`: figures of the model of a run, and of what the run recorded in training."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthlm.build import load_checkpoint
from depthlm.config import Config
from depthlm.config.saved import check_reach
from depthlm.console import stdout_console
from depthlm.counts import Count
from depthlm.data import DataError, Tokenizer, open_corpus
from depthlm.errors import UserError
from depthlm.fields import key
from depthlm.files import replacing
from depthlm.inspect.ablation import ablate
from depthlm.inspect.collect import collect
from depthlm.inspect.depth_mixing import depth_mixing, mixing_picture
from depthlm.inspect.interventions import Batch
from depthlm.inspect.picture import TOKENS, Array, Picture, token_names
from depthlm.machine import environment
from depthlm.model import Decoder
from depthlm.run_directory import RunDirectory
from depthlm.runs.plots import grid, save, subplots
from depthlm.runs.records import read_metrics

ARRAYS = "arrays.npz"
# tokens per forward pass: the attention maps of more tokens need gigabytes
PASS = 2048
TITLES = {
    "attention_output": "output of the attention",
    "mlp_output": "output of the MLP",
    "attention_gradient": "gradient at the attention's output",
    "mlp_gradient": "gradient at the MLP's output",
}
PARTS = tuple(TITLES)
EXPERT_KEYS = ("step", "load", "entropy", "bias")
# steps per panel: with more, the curves are hard to distinguish
CURVES = 8


@dataclass
class Inspect:
    """The arguments of `inspect`."""

    run: str = key(doc="run directory; its newest complete checkpoint is inspected")
    compare: list[str] | None = key(None, "other run directories, whose depth mixing matrices are drawn beside it")
    to: str | None = key(None, "folder for the figures; null: inspect/ in the run directory")
    ablate: Literal["edges"] | None = key(
        None,
        "instead of the figures, the change of the loss if a weight over depth is 0, for each of them (of streams, if "
        "H_res is the identity)",
    )
    renormalize: bool = key(True, "ablate: whether the other weights of a softmax are renormalized")
    tokens: Count = key(8192, "maximum number of tokens of the first validation set", minimum=1)
    text: str | None = key(None, "your own text, instead of the validation set")
    device: environment.Device = key("auto", "auto: the GPU, or the CPU if there is none")
    trust: list[str] | None = key(
        None, "modules that may define the run's own mechanism; run: also the validation set of another user's run"
    )


def inspect_run(arguments: Inspect) -> Path:
    """Write the pictures of a run, print their names, and return their folder.

    Raises UserError for a directory without a run or a complete checkpoint, for missing tokens, or for a folder that
    cannot be written to.
    """
    directory = Path(arguments.run)
    check_arguments(arguments)
    run = read_run(directory, arguments)
    model, config, batches, source = run.model, run.config, run.windows(), run.source
    folder = Path(arguments.to) if arguments.to is not None else RunDirectory(directory).inspection
    with writable(folder):
        # fail before the forward passes, which may take minutes
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    if arguments.ablate is not None:
        return ablate_run(folder, arguments, run)
    first = batches[0][0, :TOKENS].tolist()
    names = token_names(Tokenizer.load(directory), first) if arguments.text is not None else []
    pictures, messages = collect(model, batches, names)
    matrices = [measure_matrix(model, config, batches, messages)]
    for other in arguments.compare or ():
        compared = read_run(Path(other), arguments)
        matrices.append(measure_matrix(compared.model, compared.config, compared.windows(), messages))
    pictures.append(mixing_picture(matrices))
    pictures += filter(None, (expert_picture(directory), sublayer_norm_picture(directory)))
    if pictures[-1].name != "blocks":
        messages.append("training.log_blocks_every was not set, so there is no figure of outputs over training")
    with writable(folder):
        write(folder, pictures)
    tokens = sum(part.numel() for part in batches)
    _show(folder, pictures, [f"{tokens:,} tokens of {source}, in windows of {batches[0].shape[1]:,}", *messages])
    return folder


class Run(NamedTuple):
    """A run, and the tokens on which it is inspected. source: a description of them."""

    model: Decoder
    config: Config
    tokens: Tensor
    source: str

    def windows(self) -> list[Tensor]:
        """Return the tokens in windows of tokens_bt."""
        return windows(self.tokens, self.config.training.sequence_length)

    def batches(self) -> list[Batch]:
        """Return windows of inputs and targets. Each token but the first is a target once.

        Raises UserError for a single token.
        """
        if len(self.tokens) < 2:
            raise UserError(f"{self.source} has one token, which leaves nothing to predict; give more text")
        length, device = self.config.training.sequence_length, next(self.model.parameters()).device
        inputs, targets = (windows(part.to(device), length) for part in (self.tokens[:-1], self.tokens[1:]))
        return list(zip(inputs, targets, strict=True))


def check_arguments(arguments: Inspect) -> None:
    """Raise UserError for keys that do not go together."""
    if arguments.ablate is not None and arguments.compare:
        raise UserError("compare=: does not go with ablate=; leave it out")
    if arguments.ablate is None and not arguments.renormalize:
        raise UserError("renormalize=false: has an effect only with ablate=")


def ablate_run(folder: Path, arguments: Inspect, run: Run) -> Path:
    """Write the pictures of an ablation. Raises UserError."""
    name = f"ablation_{arguments.ablate}.npz"
    pictures, lines = ablate(run.model, run.batches(), arguments.renormalize)
    with writable(folder):
        write(folder, pictures, name)
    _show(folder, pictures, [f"{len(run.tokens):,} tokens of {run.source}", *lines], name)
    return folder


def read_run(directory: Path, arguments: Inspect) -> Run:
    """Return a run's model and configuration, and the tokens on which it is inspected."""
    model, config, _ = load_checkpoint(directory, environment.usable_device(arguments.device), arguments.trust or ())
    if arguments.text is None:
        check_reach(directory, config, arguments.trust or (), lambda name: name.startswith("data."))
    tokens, source = read_tokens(directory, config, arguments.text, arguments.tokens)
    return Run(model, config, tokens, source)


def measure_matrix(model: Decoder, config: Config, batches: Sequence[Tensor], messages: list[str]) -> tuple[str, Array]:
    """Return the title and the depth mixing matrix of a run. A warning about the matrix is appended to the messages."""
    matrix, warnings = depth_mixing(model, batches)
    messages += warnings
    return f"{config.model.name}, {config.size.name}", matrix


def read_tokens(directory: Path, config: Config, text: str | None, most: int) -> tuple[Tensor, str]:
    """Return at most `most` tokens for a run's model, and a description of their source.

    Raises UserError if there are none.
    """
    if text is not None:
        (text_tokens,) = Tokenizer.load(directory).encode_batch([text])
        if not text_tokens:
            raise UserError("text=: it has no tokens; give some text, or omit text= to use the validation set")
        return torch.tensor(text_tokens[:most]), "the given text"
    try:
        name, tokens = next(iter(open_corpus(config.data).validation.items()))
    except DataError as error:
        raise UserError(f"{error} Or give your own text: text=...") from None
    # only full windows, if there is at least one
    length = config.training.sequence_length
    count = min(len(tokens), most)
    count = count // length * length or count
    if count < 1:
        raise UserError(f"the validation set {name} has no tokens; give text=...")
    return torch.from_numpy(tokens.read(0, count)), f"the validation set {name}"


def windows(tokens: Tensor, length: int) -> list[Tensor]:
    """Split tokens into tokens_bt of at most PASS tokens, in windows of `length`. The last window may be shorter."""
    full = len(tokens) // length * length
    batches = list(tokens[:full].view(-1, length).split(max(1, PASS // length)))
    return [part for part in (*batches, tokens[None, full:]) if part.numel()]


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Raise UserError instead of an OSError from writing to the folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder}: cannot be written to ({reason}); choose another folder with to=...") from None


def write(folder: Path, pictures: Sequence[Picture], name: str = ARRAYS) -> None:
    """Write all pictures and arrays. Raises OSError."""
    for picture in pictures:
        save(picture.draw(), folder / f"{picture.name}.png")
    arrays: dict[str, Any] = {name: array for picture in pictures for name, array in picture.arrays.items()}
    with replacing(folder / name) as temporary:
        np.savez_compressed(temporary, **arrays)


def _show(folder: Path, pictures: Sequence[Picture], messages: Sequence[str], name: str = ARRAYS) -> None:
    console = stdout_console()
    lines = [*messages, f"{folder}:"]
    width = max(len(f"{picture.name}.png") for picture in pictures) if pictures else 0
    lines += [f"  {picture.name + '.png':{width}}  {picture.about}" for picture in pictures]
    lines.append(f"  {name:{width}}  the arrays that they show:")
    lines += [f"    {name} {list(array.shape)}" for picture in pictures for name, array in picture.arrays.items()]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


# Pictures of what the run recorded in training.


def sublayer_norm_picture(directory: Path) -> Picture | None:
    """Return the picture of a run's sublayer norms, from blocks.jsonl; None if the file is missing or empty."""
    rows = list(read_metrics(RunDirectory(directory).sublayer_norms, {"step"}, PARTS))
    if not rows:
        return None
    steps = np.array([row["step"] for row in rows])
    # non-finite values are null in the file, and nan here
    arrays = {f"blocks_{part}": np.array([row[part] for row in rows], dtype=float) for part in PARTS}
    about = "size of outputs and gradients by layer, over training (Figure 5 of arXiv 2603.15031)"
    return Picture("blocks", about, {"blocks_step": steps, **arrays}, partial(draw_sublayer_norms, steps, arrays))


def draw_sublayer_norms(steps: Array, arrays: dict[str, Array]) -> Any:
    """Draw outputs and gradients over layers in separate panels for attention and MLP, with one curve per step."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    figure, axes = subplots(2, 10.5, 6.6, rows=2, sharex=True, sharey="row")
    # the palest colours are invisible on white
    colours = ListedColormap(matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1, 256)))
    norm = Normalize(steps[0], max(steps[-1], steps[0] + 1))
    shown = sorted({int(np.abs(steps - step).argmin()) for step in np.linspace(steps[0], steps[-1], CURVES)})
    for place, part in zip(axes.flat, PARTS, strict=True):
        values = arrays[f"blocks_{part}"]
        for number in shown:
            place.plot(values[number], color=colours(norm(steps[number])), marker="o", ms=3, lw=1.3)
        positive = values[shown][values[shown] > 0]
        if positive.size:
            place.set_yscale("log")
        place.xaxis.get_major_locator().set_params(integer=True)
        place.set_title(TITLES[part], fontsize="medium")
        grid(place)
    for place, label in zip(axes[:, 0], ("output, root mean square", "gradient, root mean square"), strict=True):
        place.set_ylabel(label)
    figure.supxlabel("layer", fontsize="medium")
    figure.suptitle("Outputs of the sublayers, and the gradient of the loss there", fontsize="medium")
    figure.colorbar(ScalarMappable(norm, colours), ax=axes, shrink=0.85, pad=0.02, label="step")
    return figure


def expert_picture(directory: Path) -> Picture | None:
    """Return the picture of a run's experts.jsonl; None if the file is missing or empty."""
    rows: list[list[Array]] = []
    for row in read_metrics(RunDirectory(directory).experts, {"step"}):
        # rows of other shapes are damaged
        with suppress(KeyError, TypeError, ValueError):
            values = [np.array(row[key], dtype=float) for key in EXPERT_KEYS]
            shapes = [value.shape for value in values]
            if len(shapes[1]) == 2 and shapes[2] == shapes[1][:1] and shapes[3] in (shapes[1], (0,)):
                rows += [values] if not rows or shapes == [value.shape for value in rows[0]] else []
    if not rows:
        return None
    arrays = {
        f"experts_{key}": np.array(values) for key, values in zip(EXPERT_KEYS, zip(*rows, strict=True), strict=True)
    }
    about = "share of each expert in the load of its layer; balance and entropy of the routers over training"
    return Picture("experts", about, arrays, partial(draw_experts, arrays))


def draw_experts(arrays: dict[str, Array]) -> Any:
    """Draw the load at the last logged step, and the largest load, entropy and bias of each layer over training."""
    steps, load, entropy = (arrays[f"experts_{key}"] for key in ("step", "load", "entropy"))
    layers, experts = load.shape[1:]
    figure, axes = subplots(2, 10.5, 6.4, rows=2)
    image = axes[0, 0].imshow(load[-1] * experts, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes[0, 0].set(xlabel="expert", ylabel="layer with experts")
    axes[0, 0].set_title(f"load at step {steps[-1]:,.0f}, 1 if all are equal", fontsize="medium")
    figure.colorbar(image, ax=axes[0, 0])
    biases = np.abs(arrays["experts_bias"])
    panels = [
        (axes[0, 1], (load * experts).max(-1), "load of the busiest expert"),
        (axes[1, 0], entropy, f"entropy of the router in nats, at most {np.log(experts):.2f}"),
        (axes[1, 1], biases.max(-1) if biases.size else None, "largest absolute bias of the router"),
    ]
    for place, values, title in panels:
        place.set_title(title, fontsize="medium")
        place.set_xlabel("step")
        grid(place)
        if values is None:
            place.text(0.5, 0.5, "these routers have no bias", ha="center", va="center", transform=place.transAxes)
            continue
        for layer in range(layers):
            label = f"layer {layer}" if layer in (0, layers - 1) else None
            place.plot(steps, values[:, layer], color=_colour(layer, layers), lw=1.3, label=label)
        place.legend(fontsize="small", frameon=False)
    return figure


def _colour(layer: int, layers: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis_r"](0.1 + 0.9 * layer / max(layers - 1, 1))
