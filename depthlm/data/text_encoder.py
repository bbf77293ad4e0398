"""The encoder of plain text made from a tokenizer.json: deterministic, and without special tokens in its reach."""

import hashlib
import json
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer as Encoder
from tokenizers import pre_tokenizers

from depthlm.data.end_of_text import is_character


def text_encoder(text: str, end_of_text: str) -> Encoder:
    """Return an encoder with the ids of this tokenizer.json that encodes no text as a special token or the end of text.

    These tokens get names that no text has, so text that is spelled like one is encoded by the other tokens. That is
    exact for each model: a Unigram lattice and a table of words lack the name, and BPE lacks the merges that make it.
    BPE dropout, truncation and padding are off.
    """
    record = json.loads(text)
    model, added = record["model"], record.get("added_tokens") or []
    record["truncation"] = record["padding"] = None
    if model.get("dropout"):
        model["dropout"] = None
    special = {token["content"] for token in added if token["special"]}
    # a character or a byte may be text that only this token encodes
    names = _unreachable_names(text, {token for token in special if not is_character(token)} | {end_of_text})
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
        model["merges"] = [merge for merge, (a, b) in pairs if not {a, b, _merged(model, a, b)} & names.keys()]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    encoder = Encoder.from_str(json.dumps(record))
    encoder.encode_special_tokens = True
    return encoder


def unknown_token(text: str) -> int | None:
    """Return the id of the token that stands for what a tokenizer.json does not know; None if it has no such token."""
    record = json.loads(text)
    model = record["model"]
    if isinstance(model["vocab"], list):
        return model.get("unk_id")
    added = {token["content"]: token["id"] for token in record.get("added_tokens") or []}
    return model["vocab"].get(model.get("unk_token"), added.get(model.get("unk_token")))


def drops_unknown(text: str) -> bool:
    """Return whether a tokenizer.json loses the characters that it does not know, without a token for them."""
    model = json.loads(text)["model"]
    if not isinstance(model["vocab"], dict) or model.get("unk_token") is not None or model.get("byte_fallback"):
        return False
    return not model["vocab"].keys() >= {*pre_tokenizers.ByteLevel.alphabet()}


def _unreachable_names(text: str, tokens: Collection[str]) -> dict[str, str]:
    # U+FDD0 is a noncharacter, and the digest is of the tokenizer itself
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {token: f"\ufdd0{digest}:{number}" for number, token in enumerate(sorted(tokens))}


def _merged(model: dict[str, Any], first: str, second: str) -> str:
    """Return the token that BPE merges a pair into, without the prefix of a continuing subword."""
    prefix = model.get("continuing_subword_prefix") or ""
    return first + second.removeprefix(prefix)
