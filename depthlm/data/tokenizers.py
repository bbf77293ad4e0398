"""Tokenizers: bytes, a byte-level BPE trained on the corpus, or a tokenizer.json; and the token that ends a document.

A key or a file beside tokenizer.json names this token, or it has a usual name.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers, trainers

from depthlm.errors import DataError
from depthlm.files import read_bytes, replace_text

FILE_NAME, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
_USUAL_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
# files beside a tokenizer that name its end of text, in the order of precedence
FILES = ("generation_config.json", "config.json", TOKENIZER_CONFIG)
PADDING = "<|padding|>"
# Bytes of text per token of its vocabulary that the BPE is trained on, and the least and the most bytes. More text
# changes few merges and takes longer.
BYTES_PER_TOKEN, MIN_BPE_BYTES, MAX_BPE_BYTES = 2**12, 2**23, 2**25
REMEDY = "Set data.tokenizer to `bpe`, `bytes`, the path of a tokenizer.json or a model on the hub."

# The library warns when a process forks after the library has used threads, and data loaders fork; only `prepare`
# turns its threads on.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class EndOfText(NamedTuple):
    """The token that ends a document, its id, and what names it: a key, a file, or its usual name."""

    token: str
    id: int
    source: str


class Tokenizer:
    """A tokenizer.json; it never encodes text as special tokens and adds no tokens to a text.

    Attributes: text, the content of the file; fingerprint, its sha256; vocab_size, the largest id plus one;
    end_of_text, the id that follows each document; end, that token and what names it; dropout, the share of merges that
    BPE dropout would skip (it is off here). Raises DataError for a file that is not a tokenizer or has no end-of-text
    token.
    """

    def __init__(
        self,
        text: str,
        where: object = "tokenizer",
        end_of_text: str | None = None,
        files: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """end_of_text: data.end_of_text. files: the content of the files beside the tokenizer (`read_files`)."""
        try:
            self._encoder = Encoder.from_str(text)
        except Exception as error:  # the library raises no narrower type
            remedy = "Give a tokenizer.json of the `tokenizers` library, `bpe` or `bytes`."
            raise DataError(f"not a tokenizer ({error})", where, remedy) from error
        self.text, self.where = text, where
        self.end = choose(self._encoder, end_of_text, files, where)
        self.end_of_text = self.end.id
        self.vocab_size = max(self.vocabulary().values()) + 1
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.dropout: float | None = getattr(self._encoder.model, "dropout", None)

    @classmethod
    def load(cls, path: str | Path, end_of_text: str | None = None) -> "Tokenizer":
        """Load the tokenizer of this file, or of the tokenizer.json in this folder."""
        file = Path(path, FILE_NAME) if Path(path).is_dir() else Path(path)
        try:
            return cls(read_bytes(file).decode("utf-8"), file, end_of_text, read_files(file.parent))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read a tokenizer ({error})", file, REMEDY) from error

    @classmethod
    def from_hub(cls, name: str, end_of_text: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a model on the hub. Raises DataError where it is not available."""
        from depthlm.data.corpora.hub import hub_tokenizer

        contents = hub_tokenizer(name, FILES)
        text = contents.pop(FILE_NAME)
        return cls(text.decode(), name, end_of_text, {file: parse_json(content) for file, content in contents.items()})

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token."""
        return self._encoder.get_vocab()

    @cached_property
    def unknown(self) -> int | None:
        """The id of the token that stands for text which the tokenizer does not know; None if there is none.

        The end of text stands for no text.
        """
        model = self._encoder.model
        if isinstance(model, models.Unigram):
            unknown = json.loads(self.text)["model"].get("unk_id")
        else:
            unknown = None if model.unk_token is None else self._encoder.token_to_id(model.unk_token)
        return None if unknown == self.end_of_text else unknown

    @property
    def drops_unknown(self) -> bool:
        """Whether characters that the tokenizer does not know are lost, without a token for them."""
        model = self._encoder.model
        if isinstance(model, models.Unigram) or model.unk_token is not None or getattr(model, "byte_fallback", False):
            return False
        return not self.vocabulary().keys() >= {*pre_tokenizers.ByteLevel.alphabet()}

    def encode_batch(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[list[int]]:
        """Return the ids of each text; a special token's name inside a text is encoded as ordinary text.

        before: what precedes each text in its document, or the end of that. If the two meet at a boundary of tokens
        (`is_boundary`), the ids are those that the text has there, without a prefix space.
        Raises DataError where a text contains the end of text, because that is also the unknown token.
        """
        before = before or [""] * len(texts)
        encoded = self._encode([preceding + text for preceding, text in zip(before, texts, strict=True)])
        for number, preceding in enumerate(before):
            if preceding:
                (ids,) = self._encode([preceding])
                is_prefix = encoded[number][: len(ids)] == ids
                encoded[number] = encoded[number][len(ids) :] if is_prefix else self._encode([texts[number]])[0]
        if any(self.end_of_text in ids for ids in encoded):
            what = f"the end of text, {self.end.token!r}, is also what the tokenizer encodes unknown text as"
            raise DataError(what, self.where, "Set data.end_of_text to another token, or give another data.tokenizer.")
        return encoded

    def is_boundary(self, before: str, after: str) -> bool:
        """Return whether a text may be cut here: what follows does not change the ids of what precedes."""
        alone, together = self._encode([before, before + after])
        return together[: len(alone)] == alone

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._text_encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises no narrower type
            raise DataError(f"the tokenizer cannot encode a text ({error})", self.where, REMEDY) from error
        return [encoding.ids for encoding in encodings]

    @cached_property
    def _text_encoder(self) -> Encoder:
        return text_encoder(self.text, self.end.token)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of these ids, with special tokens by name; bytes that are not UTF-8 become U+FFFD."""
        return self._encoder.decode([int(i) for i in ids], skip_special_tokens=False)

    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Return the UTF-8 bytes of the text of each id, [vocab_size], 0 for the end of text.

        None where an id alone does not determine them: only the tokens of a byte-level tokenizer are bytes.
        """
        if not isinstance(self._encoder.decoder, decoders.ByteLevel):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self.vocabulary().items():
            # a character of a token stands for one byte
            lengths[number] = len(token)
        for number, added in self._encoder.get_added_tokens_decoder().items():
            lengths[number] = len(added.content.encode())
        lengths[self.end_of_text] = 0
        return lengths

    def save(self, folder: str | Path) -> Path:
        """Write tokenizer.json into the folder and return the file's path.

        An end of text that tokenizer.json alone does not give is written to tokenizer_config.json for `load`.
        """
        file = Path(folder, FILE_NAME)
        replace_text(file, self.text)
        if self.has_unusual_end:
            replace_text(Path(folder, TOKENIZER_CONFIG), json.dumps({"eos_token": self.end.token}) + "\n")
        return file

    @property
    def has_unusual_end(self) -> bool:
        """Whether tokenizer.json alone gives another end of text."""
        usual = usual_end_of_text(self._encoder)
        return usual is None or usual.id != self.end_of_text


def choose(encoder: Encoder, token: str | None, files: Mapping[str, Any], where: object) -> EndOfText:
    """Return the end of text of a tokenizer.

    token: the value of data.end_of_text, which may be any token. files: the content of FILES beside the tokenizer. An
    id in them counts only if it is that of an added token, since they may have been written for another tokenizer.
    Raises DataError where the token does not exist, or nothing names a token.
    """
    if token is not None:
        number = encoder.token_to_id(token)
        if number is None:
            raise DataError(f"data.end_of_text={token}: the tokenizer has no such token", where, _remedy(encoder))
        if is_character(token):
            what = f"data.end_of_text={token}: a character of ordinary text, which has no other token"
            raise DataError(what, where, _remedy(encoder))
        return EndOfText(token, number, "data.end_of_text")
    added = encoder.get_added_tokens_decoder()
    for name in FILES:
        for value in _find_names(files.get(name)):
            named = added[value].content if type(value) is int and value in added else value
            number = encoder.token_to_id(named) if isinstance(named, str) and not is_character(named) else None
            if number is not None:
                return EndOfText(named, number, name)
    if (usual := usual_end_of_text(encoder)) is None:
        what = "no end-of-text token among the added tokens, and none named in a file beside it"
        raise DataError(what, where, _remedy(encoder))
    return usual


def usual_end_of_text(encoder: Encoder) -> EndOfText | None:
    """Return the added token with a usual name, special tokens before others; None if there is none."""
    for added in (_find_added(encoder, special=True), _find_added(encoder, special=False)):
        for name in _USUAL_NAMES:
            if name in added:
                return EndOfText(name, added[name], "its usual name")
    return None


def is_character(token: str) -> bool:
    """Return whether this is the token of a single character or byte, which text cannot be encoded without."""
    return len(token) == 1 or re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def read_files(folder: Path) -> dict[str, Any]:
    """Return the content of each of FILES that a folder has; null for a file that is not JSON."""
    return {name: parse_json(read_bytes(folder / name)) for name in FILES if (folder / name).is_file()}


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def load_tokenizer(name: str, end_of_text: str | None) -> Tokenizer:
    """Return the tokenizer `bytes`, that of a tokenizer.json, or that of a model on the hub. Raises DataError."""
    if name == "bpe":
        raise DataError("ids need the tokenizer that made them", "tokenizer=bpe", REMEDY.replace("`bpe`, ", ""))
    if name == "bytes":
        check_end_of_text(name, end_of_text)
        return bytes_tokenizer()
    return (Tokenizer.from_hub if is_on_hub(name) else Tokenizer.load)(name, end_of_text)


def check_end_of_text(tokenizer: str, token: str | None) -> None:
    """Raise DataError if `bytes` or `bpe`, which have their own, would get another end of text."""
    if token not in (None, END_OF_TEXT):
        what, remedy = f"tokenizer={tokenizer} ends documents with {END_OF_TEXT}", "Leave out data.end_of_text"
        raise DataError(what, f"end of text {token}", f"{remedy}, or --end-of-text.")


def bytes_tokenizer() -> Tokenizer:
    """Return the tokenizer in which byte b is token b, 256 the end of text and 257 the padding."""
    # A BPE without merges keeps each byte as it is. The byte-level alphabet represents byte b by chr(b) where that is
    # printable, else by the next character from 256 on.
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    encoder = _byte_level(models.BPE(vocab=alphabet, merges=[]), split_words=False)
    encoder.add_special_tokens([END_OF_TEXT, PADDING])
    return Tokenizer(encoder.to_str())


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens (fewer for a short text); id 0 is the end of text."""
    encoder = _byte_level(models.BPE(), split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    encoder.train_from_iterator(texts, trainer)
    return Tokenizer(encoder.to_str())


def sample_bytes(vocab_size: int) -> int:
    """Return how many bytes of text a BPE of this vocabulary is trained on."""
    return max(MIN_BPE_BYTES, min(MAX_BPE_BYTES, BYTES_PER_TOKEN * vocab_size))


def is_on_hub(tokenizer: str) -> bool:
    """Return whether data.tokenizer names a model on the hub: owner/name, and not a local file or folder."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", tokenizer)) and not (
        tokenizer.endswith(".json") or Path(tokenizer).exists() or Path(tokenizer).parent.exists()
    )


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Encode on all cores within this context."""
    # The library reads this variable at each call; where it is set, the library does not warn at a later fork.
    before = os.environ["TOKENIZERS_PARALLELISM"]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


def text_encoder(text: str, end_of_text: str) -> Encoder:
    """Return an encoder with the ids of this tokenizer.json that encodes no text as a special token or the end of text.

    These tokens get names that no text has, so text that is spelled like such a token is encoded by other tokens. That
    is exact for each model: a Unigram lattice and a table of words lack the name, and BPE lacks the merges to it.
    BPE dropout, truncation and padding are off.
    """
    record = json.loads(text)
    model, added = record["model"], record.get("added_tokens") or []
    record["truncation"] = record["padding"] = None
    if model.get("dropout"):
        model["dropout"] = None
    special = {token["content"] for token in added if token["special"]}
    # a character or a byte may be text that only this token encodes
    tokens = sorted({token for token in special if not is_character(token)} | {end_of_text})
    # U+FDD0 is a noncharacter, and the digest is of the tokenizer itself
    prefix_of_names = f"\ufdd0{hashlib.sha256(text.encode()).hexdigest()}"
    names = {token: f"{prefix_of_names}:{number}" for number, token in enumerate(tokens)}
    for token in added:
        token["special"] = token["special"] or token["content"] == end_of_text
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
        # a merge drops the prefix of its second part
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [merge for merge, (a, b) in pairs if not {a, b, a + b.removeprefix(prefix)} & names.keys()]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    encoder = Encoder.from_str(json.dumps(record))
    encoder.encode_special_tokens = True
    return encoder


def _find_names(record: Any) -> Iterator[Any]:
    """Yield the ids and the token that a file names, best first."""
    if isinstance(record, dict):
        ids, token = record.get("eos_token_id"), record.get("eos_token")
        yield from ids if isinstance(ids, list) else [ids]
        yield token.get("content") if isinstance(token, dict) else token


def _find_added(encoder: Encoder, special: bool) -> dict[str, int]:
    added = encoder.get_added_tokens_decoder().items()
    return {token.content: number for number, token in added if token.special == special}


def _remedy(encoder: Encoder) -> str:
    special = ", ".join(map(repr, list(_find_added(encoder, special=True))[:8]))
    shown = f"; its special tokens: {special}" if special else ""
    return f"Set data.end_of_text to the token that ends a document{shown}."


def _byte_level(model: models.Model, split_words: bool) -> Encoder:
    encoder = Encoder(model)
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    encoder.decoder = decoders.ByteLevel()
    return encoder
