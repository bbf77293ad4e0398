"""Text to tokens to batches: corpora, tokenizers, token files, the sampler."""

from typing import TYPE_CHECKING

from depthlm.data.corpora.sources import is_remote, train_sources, validation_sources
from depthlm.data.manifest import Manifest, verify
from depthlm.data.mixture import shares
from depthlm.data.preparation.prepare import check_prepared, prepare
from depthlm.data.token_files import (
    Corpus,
    TokenFiles,
    open_corpus,
    padded_vocab_size,
    token_folder,
    token_folders,
    vocab_size,
)
from depthlm.data.tokenizers import Tokenizer, bytes_tokenizer, is_on_hub, train_bpe
from depthlm.errors import DataError
from depthlm.lazy import lazy_attributes

if TYPE_CHECKING:
    from depthlm.data.sampler import IGNORED, Batches, DocumentRows, loader, validation_batches

__all__ = [
    "IGNORED",
    "Batches",
    "Corpus",
    "DataError",
    "DocumentRows",
    "Manifest",
    "TokenFiles",
    "Tokenizer",
    "bytes_tokenizer",
    "check_prepared",
    "is_on_hub",
    "is_remote",
    "loader",
    "open_corpus",
    "padded_vocab_size",
    "prepare",
    "shares",
    "token_folder",
    "token_folders",
    "train_bpe",
    "train_sources",
    "validation_batches",
    "validation_sources",
    "verify",
    "vocab_size",
]

_IN_SAMPLER = ("IGNORED", "Batches", "DocumentRows", "loader", "validation_batches")
__getattr__ = lazy_attributes(__name__, dict.fromkeys(_IN_SAMPLER, "sampler"))
