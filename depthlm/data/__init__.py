"""Text to tokens to batches: corpora, tokenizers, token files, the sampler."""

from depthlm.data.corpora import documents, is_validation
from depthlm.data.errors import DataError
from depthlm.data.manifest import Manifest, verify
from depthlm.data.prepare import prepare
from depthlm.data.sampler import IGNORED, Batches, loader, sample_windows, validation_batches
from depthlm.data.settings import token_folder
from depthlm.data.token_files import Corpus, TokenFiles, open_corpus
from depthlm.data.tokenizers import Tokenizer, bytes_tokenizer, padded_vocab_size, train_bpe, vocab_size

__all__ = [
    "IGNORED",
    "Batches",
    "Corpus",
    "DataError",
    "Manifest",
    "TokenFiles",
    "Tokenizer",
    "bytes_tokenizer",
    "documents",
    "is_validation",
    "loader",
    "open_corpus",
    "padded_vocab_size",
    "prepare",
    "sample_windows",
    "token_folder",
    "train_bpe",
    "validation_batches",
    "verify",
    "vocab_size",
]
