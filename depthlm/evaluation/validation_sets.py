"""Measure losses on complete validation sets, named as in evaluation.json."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from depthlm.config import Config
from depthlm.data import DataError, Manifest, TokenFiles, Tokenizer, open_corpus, validation_batches
from depthlm.data.manifest import Split
from depthlm.evaluation.perplexity import TotalLoss, total_loss
from depthlm.model import Decoder
from depthlm.runs.validation_losses import ValidationLosses, finite


@dataclass(frozen=True)
class ValidationSet:
    """A tokenized validation set. split: its record."""

    name: str
    tokens: TokenFiles
    split: Split

    def bits_per_byte(self, total: TotalLoss) -> float | None:
        """Return the bits per byte of a loss; None if it is not finite, or unknown tokens hide some of the text."""
        return None if self.split.hides_text else finite(total.bits_per_byte(self.split.bytes))


def run_sets(config: Config) -> list[ValidationSet]:
    """Return the validation sets of a run. Raises DataError if their token files do not exist."""
    corpus = open_corpus(config.data)
    return [
        ValidationSet(name, tokens, next(iter(corpus.manifests[name].validation.values())))
        for name, tokens in corpus.validation.items()
    ]


def folder_sets(folders: Iterable[str], tokenizer: Tokenizer) -> list[ValidationSet]:
    """Return the validation sets of folders of token files, named after the folders.

    Raises DataError for a folder that was prepared with another tokenizer than the run's, or two folders of one name.
    """
    sets: list[ValidationSet] = []
    for folder in map(Path, folders):
        if not Manifest.exists(folder):
            remedy = "Prepare them: python data/prepare.py with data.path=<folder> and the run's tokenizer, "
            raise DataError("sets=: no token files", folder, remedy + "data.tokenizer=<run directory>/tokenizer.json.")
        manifest = Manifest.read(folder)
        if (manifest.tokenizer, Tokenizer.load(folder).end_of_text) != (tokenizer.fingerprint, tokenizer.end_of_text):
            remedy = "Prepare it with the run's: data.tokenizer=<run directory>/tokenizer.json."
            raise DataError("prepared with another tokenizer than the run's: its ids mean other text", folder, remedy)
        if any(one.name == folder.name for one in sets):
            raise DataError("two folders of this name", folder, "Rename one: results are named after the folder.")
        (split,) = manifest.validation.values()
        tokens = TokenFiles(folder, split.files, manifest.dtype, vocab_size=manifest.vocab_size)
        sets.append(ValidationSet(folder.name, tokens, split))
    return sets


def measure_sets(
    model: Decoder, sets: Iterable[ValidationSet], sequence_length: int, batch_size: int, autocast: torch.autocast
) -> dict[str, float | None]:
    """Return `validation/<set>/loss` in nats per token, `.../perplexity` and `.../bits_per_byte`; None if not finite
    or, for bits per byte, if unknown tokens hide some of the text.

    A set is split into consecutive windows of sequence_length, the last one shorter. Every token except the first is a
    target exactly once, and the bytes are those of all targets.
    """
    device = next(model.parameters()).device
    losses: dict[str, float | None] = {}
    for one in sets:
        windows = -(-(len(one.tokens) - 1) // sequence_length)
        batches: Iterator = validation_batches(one.tokens, sequence_length, batch_size)
        shown = track(
            batches, f"{one.name}: {len(one.tokens):,} tokens", total=-(-windows // batch_size), transient=True
        )
        with autocast:
            total = total_loss(model, shown, device)
        losses |= ValidationLosses({one.name: finite(total.mean)}).row()
        losses[f"validation/{one.name}/bits_per_byte"] = one.bits_per_byte(total)
    return losses
