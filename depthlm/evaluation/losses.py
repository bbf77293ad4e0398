"""Losses, perplexities and bits per byte on complete validation sets, and their record in evaluation.json."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from depthlm.config import Config
from depthlm.data import DataError, DocumentRows, Manifest, TokenFiles, Tokenizer, open_corpus, validation_batches
from depthlm.data.manifest import Split
from depthlm.errors import UserError
from depthlm.files import read_json, replace_text
from depthlm.losses import TotalLoss, total_loss
from depthlm.model import Decoder
from depthlm.runs.records import ValidationLosses, finite, text_key


@dataclass(frozen=True)
class ValidationSet:
    """A tokenized validation set. split: its record."""

    name: str
    tokens: TokenFiles
    split: Split

    def bits_per_byte(self, total: TotalLoss) -> float | None:
        """Return a loss in bits per byte, which is comparable across tokenizers (the Pile, arXiv 2101.00027, 3.1).

        None if it is not finite, or unknown tokens hide some of the text.
        """
        return None if self.split.hides_text else finite(total.nats / math.log(2) / self.split.bytes)


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
        if any(other.name == folder.name for other in sets):
            raise DataError("two folders of this name", folder, "Rename one: results are named after the folder.")
        (split,) = manifest.validation.values()
        tokens = TokenFiles(folder, split.files, manifest.dtype, vocab_size=manifest.vocab_size)
        sets.append(ValidationSet(folder.name, tokens, split))
    return sets


def measure_sets(
    model: Decoder,
    sets: Iterable[ValidationSet],
    sequence_length: int,
    batch_size: int,
    autocast: torch.autocast,
    documents: DocumentRows | None = None,
) -> dict[str, float | str | None]:
    """Return `validation/<set>/loss` in nats per token, `.../perplexity` and `.../bits_per_byte`; None if not finite
    or, for bits per byte, if unknown tokens hide some of the text. `.../text` names what was measured.

    A set is split into consecutive windows of sequence_length, the last one shorter, or into its documents. Every token
    except the first is a target exactly once, and the bytes are those of all targets.
    """
    device = next(model.parameters()).device
    losses: dict[str, float | str | None] = {}
    for validation_set in sets:
        windows = -(-(len(validation_set.tokens) - 1) // sequence_length)
        batches: Iterator = validation_batches(validation_set.tokens, sequence_length, batch_size, documents=documents)
        shown = track(
            batches,
            f"{validation_set.name}: {len(validation_set.tokens):,} tokens",
            total=-(-windows // batch_size) if documents is None else None,
            transient=True,
        )
        with autocast:
            total = total_loss(model, shown, device)
        losses |= ValidationLosses({validation_set.name: finite(total.mean)}).row()
        losses[f"validation/{validation_set.name}/bits_per_byte"] = validation_set.bits_per_byte(total)
        losses[text_key(validation_set.name)] = validation_set.split.first_tokens(len(validation_set.tokens))
    return losses


def add_results(path: Path, step: int, results: dict[str, Any]) -> dict[str, Any]:
    """Add results of the checkpoint of a step to evaluation.json, and return its content.

    Results of another checkpoint are dropped. Raises UserError if the file cannot be written.
    """
    before = read_json(path)
    kept = before if before.get("step") == step else {}
    recorded = {"step": step} | kept | results
    try:
        replace_text(path, json.dumps(recorded, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return recorded
