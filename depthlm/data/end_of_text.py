"""The token that ends a document: a key or a file beside tokenizer.json names it, or it has a usual name."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Encoder

from depthlm.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_USUAL_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

TOKENIZER_CONFIG = "tokenizer_config.json"
# in the order of precedence
FILES = ("generation_config.json", "config.json", TOKENIZER_CONFIG)


class EndOfText(NamedTuple):
    """The token that ends a document, its id, and what names it: a key, a file, or its usual name."""

    token: str
    id: int
    source: str


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
        for value in _named(files.get(name)):
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
    for added in (_added(encoder, special=True), _added(encoder, special=False)):
        for name in _USUAL_NAMES:
            if name in added:
                return EndOfText(name, added[name], "its usual name")
    return None


def is_character(token: str) -> bool:
    """Return whether this is the token of a single character or byte, which text cannot be encoded without."""
    return len(token) == 1 or re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def read_files(folder: Path) -> dict[str, Any]:
    """Return the content of each of FILES that a folder has; null for a file that is not JSON."""
    return {name: parsed((folder / name).read_bytes()) for name in FILES if (folder / name).is_file()}


def parsed(content: str | bytes) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _named(record: Any) -> Iterator[Any]:
    """Yield the ids and the token that a file names, best first."""
    if isinstance(record, dict):
        ids, token = record.get("eos_token_id"), record.get("eos_token")
        yield from ids if isinstance(ids, list) else [ids]
        yield token.get("content") if isinstance(token, dict) else token


def _added(encoder: Encoder, special: bool) -> dict[str, int]:
    added = encoder.get_added_tokens_decoder().items()
    return {token.content: number for number, token in added if token.special == special}


def _remedy(encoder: Encoder) -> str:
    special = ", ".join(map(repr, list(_added(encoder, special=True))[:8]))
    shown = f"; its special tokens: {special}" if special else ""
    return f"Set data.end_of_text to the token that ends a document{shown}."
