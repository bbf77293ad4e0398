"""`python -m depthlm inspect`: figures of the model of a run."""

import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
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
from depthlm.inspect.collect import collect
from depthlm.inspect.depth_mixing import depth_mixing, mixing_picture
from depthlm.inspect.interventions import Batch, ablate
from depthlm.inspect.picture import Picture
from depthlm.machine import environment
from depthlm.model import Decoder
from depthlm.run_directory import RunDirectory
from depthlm.runs.plots import save

# tokens per forward pass: the attention maps of more tokens need gigabytes
PASS = 2048
# characters in a line of a panel's title
TITLE_WIDTH = 30


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
    trust: list[str] | None = key(None, "modules of the run's own mechanism; run: also the set of another user's run")


def inspect_run(arguments: Inspect) -> Path:
    """Write the pictures of a run, print their names, and return their folder.

    Raises UserError for a directory without a run or a complete checkpoint, for missing tokens, or for a folder that
    cannot be written to.
    """
    directory = Path(arguments.run)
    if arguments.ablate is not None and arguments.compare:
        raise UserError("compare=: does not go with ablate=; leave it out")
    if arguments.ablate is None and not arguments.renormalize:
        raise UserError("renormalize=false: has an effect only with ablate=")
    run = read_run(directory, arguments)
    folder = Path(arguments.to) if arguments.to is not None else RunDirectory(directory).inspection
    with writable(folder):
        # fail before the forward passes, which may take minutes
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    if arguments.ablate is not None:
        name, about = f"ablation_{arguments.ablate}.npz", ""
        pictures, messages = ablate(run.model, run.batches(), arguments.renormalize)
    else:
        name, about = "arrays.npz", f", in windows of {run.windows()[0].shape[1]:,}"
        pictures, messages = draw_mechanism(run, arguments)
    with writable(folder):
        for picture in pictures:
            save(picture.draw(), folder / f"{picture.name}.png")
        arrays: dict[str, Any] = {of: array for picture in pictures for of, array in picture.arrays.items()}
        with replacing(folder / name) as temporary:
            np.savez_compressed(temporary, **arrays)
    width = max(len(f"{picture.name}.png") for picture in pictures)
    lines = [f"{len(run.tokens):,} tokens of {run.source}{about}", *messages, f"{folder}:"]
    lines += [f"  {picture.name + '.png':{width}}  {picture.about}" for picture in pictures]
    lines.append(f"  {name:{width}}  the arrays that they show:")
    lines += [f"    {of} {list(array.shape)}" for of, array in arrays.items()]
    for line in lines:
        stdout_console().print(line, markup=False, soft_wrap=True)
    return folder


def draw_mechanism(run: "Run", arguments: Inspect) -> tuple[list[Picture], list[str]]:
    """Return the pictures of a run's mechanism and of the depth mixing matrices, and messages."""
    pictures, messages = collect(run.model, run.windows())
    folders, titles, matrices = [arguments.run, *(arguments.compare or ())], [], []
    for each in chain([run], (read_run(Path(other), arguments) for other in arguments.compare or ())):
        matrix, warnings = depth_mixing(each.model, each.windows())
        titles.append(f"{each.config.model.name}, {each.config.size.name}")
        matrices.append(matrix)
        messages += warnings
    if len({*titles}) < len(titles):
        titles = [textwrap.fill(str(folder), TITLE_WIDTH) for folder in folders]
    return [*pictures, mixing_picture(list(zip(titles, matrices, strict=True)))], messages


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


def read_run(directory: Path, arguments: Inspect) -> Run:
    """Return a run's model and configuration, and the tokens on which it is inspected."""
    model, config, _ = load_checkpoint(directory, environment.usable_device(arguments.device), arguments.trust or ())
    if arguments.text is None:
        check_reach(directory, config, arguments.trust or (), lambda name: name.startswith("data."))
    tokens, source = read_tokens(directory, config, arguments.text, arguments.tokens)
    return Run(model, config, tokens, source)


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
        name, tokens = next(iter(open_corpus(config.data, Tokenizer.load(directory)).validation.items()))
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
