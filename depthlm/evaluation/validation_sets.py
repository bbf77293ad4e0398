"""Every validation set of a run, whole, as numbers by the names of evaluation.json."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from depthlm.config import Config
from depthlm.data import DataError, Manifest, TokenFiles, Tokenizer, open_corpus, validation_batches
from depthlm.evaluation.perplexity import perplexity, total_loss
from depthlm.model import Decoder


@dataclass(frozen=True)
class ValidationSet:
    """A set of texts as tokens. bytes: of the text."""

    name: str
    tokens: TokenFiles
    bytes: int


def run_sets(config: Config) -> list[ValidationSet]:
    """The sets that a run validates on. Raises DataError where their token files are not there."""
    corpus = open_corpus(config.data)
    return [
        ValidationSet(name, tokens, sum(split.bytes for split in corpus.manifests[name].validation.values()))
        for name, tokens in corpus.validation.items()
    ]


def folder_sets(folders: Iterable[str], tokenizer: Tokenizer) -> list[ValidationSet]:
    """The sets of folders of token files, named by their folders.

    Raises DataError for a folder made with another tokenizer than the run's, or two of one name.
    """
    sets: list[ValidationSet] = []
    for folder in map(Path, folders):
        manifest = Manifest.read(folder)
        if manifest.tokenizer != tokenizer.fingerprint:
            remedy = "Prepare it with the run's: data.tokenizer=<run directory>/tokenizer.json."
            raise DataError("made with another tokenizer than the run's: its ids mean other text", folder, remedy)
        if any(one.name == folder.name for one in sets):
            raise DataError("two folders of this name", folder, "Rename one: numbers are kept by the folder's name.")
        (split,) = manifest.validation.values()
        sets.append(ValidationSet(folder.name, TokenFiles(folder, split.files, manifest.dtype), split.bytes))
    return sets


def measure_sets(
    model: Decoder, sets: Iterable[ValidationSet], sequence_length: int, batch_size: int, autocast: torch.autocast
) -> dict[str, float | None]:
    """`validation/<set>/loss` in nats per token, `.../perplexity` and `.../bits_per_byte`, each set's targets once;
    None where it is not finite.

    Windows of sequence_length follow each other without overlap, the last one shorter; every token but the first is a
    target, and the bytes are those of all of them.
    """
    device = next(model.parameters()).device
    found: dict[str, float | None] = {}
    for one in sets:
        windows = -(-(len(one.tokens) - 1) // sequence_length)
        batches: Iterator = validation_batches(one.tokens, sequence_length, batch_size)
        shown = track(
            batches, f"{one.name}: {len(one.tokens):,} tokens", total=-(-windows // batch_size), transient=True
        )
        with autocast:
            total = total_loss(model, shown, device)
        finite = math.isfinite(total.nats)
        found[f"validation/{one.name}/loss"] = total.mean if finite else None
        found[f"validation/{one.name}/perplexity"] = perplexity(total.mean) if finite else None
        found[f"validation/{one.name}/bits_per_byte"] = total.bits_per_byte(one.bytes) if finite else None
    return found
