"""The token that ends a document: named by the user, by the files beside a tokenizer.json, or by its usual name."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Encoder

from depthlm.data.errors import DataError

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


def choose(encoder: Encoder, wanted: str | None, files: Mapping[str, Any], where: object) -> EndOfText:
    """Return the end of text of a tokenizer.

    wanted: the value of data.end_of_text, which may be any token. files: the content of FILES beside the tokenizer. An
    id in them counts only if it is that of an added token: they may have been written for another tokenizer.
    Raises DataError where the wanted token does not exist, or nothing names one.
    """
    if wanted is not None:
        number = encoder.token_to_id(wanted)
        if number is None:
            raise DataError(f"data.end_of_text={wanted}: the tokenizer has no such token", where, _remedy(encoder))
        if len(wanted) == 1 and wanted not in _special(encoder):
            what = f"data.end_of_text={wanted}: a character of ordinary text, which has no other token"
            raise DataError(what, where, _remedy(encoder))
        return EndOfText(wanted, number, "data.end_of_text")
    added = encoder.get_added_tokens_decoder()
    for name in FILES:
        for value in _named(files.get(name)):
            token = added[value].content if type(value) is int and value in added else value
            if isinstance(token, str) and (number := encoder.token_to_id(token)) is not None:
                return EndOfText(token, number, name)
    if (usual := usual_end_of_text(encoder)) is None:
        raise DataError("no end-of-text token that is special, or named in a file beside it", where, _remedy(encoder))
    return usual


def usual_end_of_text(encoder: Encoder) -> EndOfText | None:
    """Return the special token with the first of the usual names; None if there is none."""
    special = _special(encoder)
    token = next((name for name in _USUAL_NAMES if name in special), None)
    return None if token is None else EndOfText(token, special[token], "its usual name")


def read_files(folder: Path) -> dict[str, Any]:
    """Return the content of those of FILES that are in a folder; one that is not JSON names no token."""
    return {name: parsed((folder / name).read_bytes()) for name in FILES if (folder / name).is_file()}


def parsed(content: bytes) -> Any:
    """Return the JSON value; None for anything else."""
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


def _special(encoder: Encoder) -> dict[str, int]:
    return {token.content: number for number, token in encoder.get_added_tokens_decoder().items() if token.special}


def _remedy(encoder: Encoder) -> str:
    special = ", ".join(map(repr, list(_special(encoder))[:8]))
    shown = f"; its special tokens: {special}" if special else ""
    return f"Set data.end_of_text to the token that ends a document{shown}."
