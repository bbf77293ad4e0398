"""The settings that determine the bytes of a configuration's token files, and the folder named after them."""

import hashlib
import json
import math
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

from depthlm.data.corpora.documents import PIECE, PIECES
from depthlm.data.corpora.sources import all_sources, is_remote, train_sources
from depthlm.data.end_of_text import read_files
from depthlm.data.errors import DataError
from depthlm.data.manifest import VERSION, Manifest
from depthlm.data.settings import Data, Source
from depthlm.data.tokenizers import REMEDY, Tokenizer, is_on_hub, sample_bytes
from depthlm.files import digest


def settings(name: str, source: Source, data: Data) -> dict[str, Any]:
    """Return everything that determines the bytes of a source's token files, except the text.

    Raises DataError for a tokenizer that cannot be read.
    """
    result: dict[str, Any] = {"version": VERSION} | _text(name, source) | _tokenizer(data)
    if name in data.validation:
        result |= {"held_out": "all"}
    else:
        if _is_held_out_by_hash(source):
            result["validation_fraction"] = data.validation_fraction
        if data.max_tokens is not None:
            result["max_tokens"] = quota(name, data)
    return result | {"shard_tokens": data.shard_tokens}


def quota(name: str, data: Data) -> int | None:
    """Return the number of training tokens to prepare: the source's share of data.max_tokens, rounded up; null: all."""
    if data.max_tokens is None:
        return None
    weights = {source: (entry.weight or 1.0) for source, entry in train_sources(data).items()}
    return math.ceil(data.max_tokens * weights[name] / sum(weights.values()))


def token_folder(name: str, source: Source, data: Data) -> Path:
    """Return the source's own path, or data/tokens/<name>-<digest of the settings> in the current folder."""
    if source.path:
        return Path(source.path)
    settings_json = json.dumps(settings(name, source, data), sort_keys=True)
    return Path("data", "tokens", f"{name}-{hashlib.sha256(settings_json.encode()).hexdigest()[:8]}")


def token_folders(data: Data) -> dict[str, Path]:
    """Return the folder of token files of every source, then of every additional validation set."""
    return {name: token_folder(name, source, data) for name, source in all_sources(data).items()}


def check_settings(name: str, source: Source, data: Data, manifest: Manifest) -> None:
    """Raise DataError where a source has a path and text, and the tokens there have other settings than requested.

    With a path alone, the tokens there are used as they are. There may be more of them than data.max_tokens.
    """
    if source.path is None or (source.source is None and source.hub is None):
        return
    wanted, prepared = settings(name, source, data), manifest.settings
    wanted_tokens, prepared_tokens = wanted.get("max_tokens"), prepared.get("max_tokens")
    if prepared_tokens is not None and (wanted_tokens is None or wanted_tokens > prepared_tokens):
        remedy = f"Set data.max_tokens to that number, set another path, or remove {source.path} to prepare more."
        what = f"only the first {prepared_tokens:,} tokens were prepared, and more are requested"
        raise DataError(what, source.path, remedy)
    # these may differ: fewer tokens are read, and files of any length
    free = {"max_tokens", "shard_tokens"}
    if differing := differences(*({k: v for k, v in each.items() if k not in free} for each in (prepared, wanted))):
        remedy = "Set another path, or data.source=null data.hub=null to train on these tokens as they are."
        raise DataError(f"token files made with other settings ({differing})", source.path, remedy)


def differences(prepared: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return the settings that differ with both values, as words; empty if there are none."""
    differing = [key for key in sorted({*wanted, *prepared}) if wanted.get(key) != prepared.get(key)]
    return ", ".join(f"{key}: prepared {prepared.get(key)}, requested {wanted.get(key)}" for key in differing)


def _is_held_out_by_hash(source: Source) -> bool:
    return (source.validation_split if is_remote(source) else source.validation_files) is None


def _text(name: str, source: Source) -> dict[str, Any]:
    if is_remote(source):
        keys = ("hub", "subset", "revision", "split", "validation_split", "text_field")
        return {key: getattr(source, key) for key in keys}
    if source.source is None:
        return {"corpus": name, "python": platform.python_version()}
    # independent of whether the text still exists: its tokens outlive it
    text = {"source": str(Path(source.source).resolve()), "text_field": source.text_field, "piece": [PIECE, PIECES]}
    patterns = {"files": source.files, "validation_files": source.validation_files}
    return text | patterns | {"suffixes": sorted(source.suffixes or ())}


def _tokenizer(data: Data) -> dict[str, Any]:
    name = data.tokenizer
    if name == "bytes":
        return {"tokenizer": name}
    if name != "bpe":
        if is_on_hub(name):
            return {"tokenizer": name} | ({} if data.end_of_text is None else {"end_of_text": data.end_of_text})
        tokenizer_digest, files = _digest_of_file(name), read_files(Path(name).parent)
        end = _unusual_end(name, tokenizer_digest, data.end_of_text, repr(files)) if files or data.end_of_text else {}
        return {"tokenizer": tokenizer_digest} | end
    result: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": data.vocab_size}
    result["trained_on_bytes"] = sample_bytes(data.vocab_size)
    if data.sources or data.validation:
        # the tokenizer is trained on the text of every source, and shared by the additional validation sets
        texts = [_text(source_name, source) for source_name, source in train_sources(data).items()]
        result["trained_on"] = [*texts, data.validation_fraction]
    return result


@lru_cache
def _unusual_end(tokenizer: str, tokenizer_digest: str, end_of_text: str | None, files: str) -> dict[str, str]:
    """Return the end of text where it is not the one that tokenizer.json alone gives.

    tokenizer_digest, files: the content of the tokenizer and of the files beside it, on which the result depends.
    """
    loaded = Tokenizer.load(tokenizer, end_of_text)
    return {"end_of_text": loaded.end.token} if loaded.has_unusual_end else {}


def _digest_of_file(tokenizer: str) -> str:
    try:
        return digest(Path(tokenizer))
    except OSError as error:
        raise DataError(f"cannot read a tokenizer ({error.strerror})", tokenizer, REMEDY) from error
