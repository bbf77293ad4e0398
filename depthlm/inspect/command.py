"""`python -m depthlm inspect`: from a run directory to pictures and the arrays behind them."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from depthlm.config import Config
from depthlm.console import stdout_console
from depthlm.data import DataError, Tokenizer, open_corpus
from depthlm.errors import UserError
from depthlm.fields import key
from depthlm.inspect.blocks import block_picture
from depthlm.inspect.collect import collect
from depthlm.inspect.picture import Picture
from depthlm.loading import load
from depthlm.machine import environment
from depthlm.report.figures.style import save

ARRAYS = "arrays.npz"
# tokens of one forward pass: the attention maps of more need gigabytes
PASS = 2048


@dataclass
class Inspect:
    """What `inspect` takes."""

    run: str = key(doc="run directory; its newest whole checkpoint is looked into")
    to: Optional[str] = key(None, "folder of the pictures; null: inspect/ in the run directory")
    tokens: Any = key(8192, "at most so many tokens of the first validation set", minimum=1, count=True)
    text: Optional[str] = key(None, "text of your own instead of the validation set")
    device: str = key("auto", "auto: the GPU, or the CPU where there is none", choices=environment.DEVICES)
    trust: Optional[list[str]] = key(None, "modules that the run's own mechanism may come from")


def inspect_run(arguments: Inspect) -> Path:
    """Write the pictures of a run, and say which; the folder they lie in.

    Raises UserError for a directory without a run or whole checkpoint, tokens that are not there, or a folder that
    cannot be written to.
    """
    directory = Path(arguments.run)
    model, config = load(directory, device=environment.usable_device(arguments.device), trust=arguments.trust or ())
    tokens, source = read_tokens(directory, config, arguments.text, arguments.tokens)
    folder = Path(arguments.to) if arguments.to is not None else directory / "inspect"
    length = config.training.sequence_length
    with writable(folder):
        # before minutes of work
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    pictures, told = collect(model, windows(tokens, length))
    if (blocks := block_picture(directory)) is not None:
        pictures.append(blocks)
    else:
        told.append("training.log_blocks_every was not set, so there is no picture of outputs over training")
    with writable(folder):
        write(folder, pictures)
    _show(folder, pictures, [f"{len(tokens):,} tokens of {source}, in windows of {min(length, len(tokens)):,}", *told])
    return folder


def read_tokens(directory: Path, config: Config, text: str | None, most: int) -> tuple[Tensor, str]:
    """The tokens that a run's model is to be shown, at most so many, and where they are from, in words.

    Raises UserError where there are none.
    """
    if text is not None:
        (found,) = Tokenizer.load(directory).encode_batch([text])
        if not found:
            raise UserError("text=: it has no tokens; give some text, or leave it out for the validation set")
        return torch.tensor(found[:most]), "the text given"
    try:
        name, tokens = next(iter(open_corpus(config.data).validation.items()))
    except DataError as error:
        raise UserError(f"{error} Or give text of your own: text=...") from None
    # whole windows, where there is one
    length = config.training.sequence_length
    count = min(len(tokens), most)
    count = count // length * length or count
    if count < 1:
        raise UserError(f"the validation set {name} has no tokens; give text=...")
    return torch.from_numpy(tokens.read(0, count)), f"the validation set {name}"


def windows(tokens: Tensor, length: int) -> list[Tensor]:
    """The tokens as tokens_bt of at most PASS tokens, in windows of a length, the last one what is left."""
    whole = len(tokens) // length * length
    found = list(tokens[:whole].view(-1, length).split(max(1, PASS // length)))
    return [part for part in (*found, tokens[None, whole:]) if part.numel()]


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Raises UserError where writing to the folder fails inside."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder}: cannot be written to ({reason}); give another folder as to=...") from None


def write(folder: Path, pictures: Sequence[Picture]) -> None:
    """Write each picture, and all arrays. Raises OSError."""
    for picture in pictures:
        save(picture.draw(), folder / f"{picture.name}.png")
    arrays: dict[str, Any] = {name: array for picture in pictures for name, array in picture.arrays.items()}
    np.savez_compressed(folder / ARRAYS, **arrays)


def _show(folder: Path, pictures: Sequence[Picture], told: Sequence[str]) -> None:
    console = stdout_console()
    lines = [*told, f"{folder}:"]
    wide = max(len(f"{picture.name}.png") for picture in pictures) if pictures else 0
    lines += [f"  {picture.name + '.png':{wide}}  {picture.about}" for picture in pictures]
    lines.append(f"  {ARRAYS:{wide}}  the arrays behind them:")
    lines += [f"    {name} {list(array.shape)}" for picture in pictures for name, array in picture.arrays.items()]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
