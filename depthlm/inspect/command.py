"""`python -m depthlm inspect`: write figures of a run and the arrays that they show."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthlm.build import load
from depthlm.config import Config
from depthlm.config.saved import check_reach
from depthlm.console import stdout_console
from depthlm.counts import Count
from depthlm.data import DataError, Tokenizer, open_corpus
from depthlm.errors import UserError
from depthlm.fields import key
from depthlm.inspect.collect import collect
from depthlm.inspect.depth_mixing import depth_mixing, mixing_picture
from depthlm.inspect.figures import TOKENS, token_names
from depthlm.inspect.picture import Array, Picture
from depthlm.inspect.recorded import expert_picture, sublayer_norm_picture
from depthlm.machine import environment
from depthlm.model import Decoder
from depthlm.report.figures.style import save
from depthlm.run_directory import RunDirectory

ARRAYS = "arrays.npz"
# tokens per forward pass: the attention maps of more tokens need gigabytes
PASS = 2048


@dataclass
class Inspect:
    """The arguments of `inspect`."""

    run: str = key(doc="run directory; its newest complete checkpoint is inspected")
    compare: list[str] | None = key(None, "other run directories, whose depth mixing matrices are drawn beside it")
    to: str | None = key(None, "folder for the figures; null: inspect/ in the run directory")
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
    model, config, batches, source = read_run(directory, arguments)
    folder = Path(arguments.to) if arguments.to is not None else RunDirectory(directory).inspection
    with writable(folder):
        # fail before the forward passes, which may take minutes
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    first = batches[0][0, :TOKENS].tolist()
    names = token_names(Tokenizer.load(directory), first) if arguments.text is not None else []
    pictures, messages = collect(model, batches, names)
    matrices = [titled_matrix(model, config, batches, messages)]
    for other in arguments.compare or ():
        matrices.append(titled_matrix(*read_run(Path(other), arguments)[:3], messages))
    pictures.append(mixing_picture(matrices))
    pictures += filter(None, (expert_picture(directory), sublayer_norm_picture(directory)))
    if pictures[-1].name != "blocks":
        messages.append("training.log_blocks_every was not set, so there is no figure of outputs over training")
    with writable(folder):
        write(folder, pictures)
    tokens = sum(part.numel() for part in batches)
    _show(folder, pictures, [f"{tokens:,} tokens of {source}, in windows of {batches[0].shape[1]:,}", *messages])
    return folder


def read_run(directory: Path, arguments: Inspect) -> tuple[Decoder, Config, list[Tensor], str]:
    """Return a run's model and configuration, its windows of tokens_bt, and a description of their source."""
    model, config = load(directory, device=environment.usable_device(arguments.device), trust=arguments.trust or ())
    if arguments.text is None:
        check_reach(directory, config, arguments.trust or (), lambda name: name.startswith("data."))
    tokens, source = read_tokens(directory, config, arguments.text, arguments.tokens)
    return model, config, windows(tokens, config.training.sequence_length), source


def titled_matrix(model: Decoder, config: Config, batches: Sequence[Tensor], messages: list[str]) -> tuple[str, Array]:
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


def write(folder: Path, pictures: Sequence[Picture]) -> None:
    """Write all pictures and arrays. Raises OSError."""
    for picture in pictures:
        save(picture.draw(), folder / f"{picture.name}.png")
    arrays: dict[str, Any] = {name: array for picture in pictures for name, array in picture.arrays.items()}
    np.savez_compressed(folder / ARRAYS, **arrays)


def _show(folder: Path, pictures: Sequence[Picture], messages: Sequence[str]) -> None:
    console = stdout_console()
    lines = [*messages, f"{folder}:"]
    width = max(len(f"{picture.name}.png") for picture in pictures) if pictures else 0
    lines += [f"  {picture.name + '.png':{width}}  {picture.about}" for picture in pictures]
    lines.append(f"  {ARRAYS:{width}}  the arrays that they show:")
    lines += [f"    {name} {list(array.shape)}" for picture in pictures for name, array in picture.arrays.items()]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
