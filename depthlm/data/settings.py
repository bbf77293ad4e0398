"""Which token files a configuration means: the settings that decide their bytes, and the folder named by them."""

import hashlib
import json
import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthlm.data.corpora.documents import PIECE, PIECES
from depthlm.data.corpora.sources import is_remote, train_sources, validation_sources
from depthlm.data.errors import DataError
from depthlm.data.manifest import VERSION, Manifest
from depthlm.data.tokenizers import is_on_hub, sample_bytes

if TYPE_CHECKING:
    from depthlm.config.schema import Data, Source


def settings(name: str, source: "Source", data: "Data") -> dict[str, Any]:
    """Everything that the bytes of a source's token files follow from, the text aside.

    Raises DataError for a tokenizer that cannot be read.
    """
    found: dict[str, Any] = {"version": VERSION} | _text(name, source) | _tokenizer(data)
    if name in data.validation:
        found |= {"held_out": "all"}
    else:
        if _hashed(source):
            found["validation_fraction"] = data.validation_fraction
        if data.max_tokens is not None:
            found["max_tokens"] = quota(name, data)
    return found | {"shard_tokens": data.shard_tokens}


def quota(name: str, data: "Data") -> int | None:
    """The training tokens that are prepared of a source: its share of data.max_tokens, rounded up; null: all."""
    if data.max_tokens is None:
        return None
    weights = {source: (entry.weight or 1.0) for source, entry in train_sources(data).items()}
    return math.ceil(data.max_tokens * weights[name] / sum(weights.values()))


def token_folder(name: str, source: "Source", data: "Data") -> Path:
    """The source's own path, or data/tokens/<name>-<digest of the settings> below the current folder."""
    if source.path:
        return Path(source.path)
    digest = hashlib.sha256(json.dumps(settings(name, source, data), sort_keys=True).encode()).hexdigest()[:8]
    return Path("data", "tokens", f"{name}-{digest}")


def token_folders(data: "Data") -> dict[str, Path]:
    """Where the token files of every source, then of every further validation set, lie or belong."""
    everything = train_sources(data) | validation_sources(data)
    return {name: token_folder(name, source, data) for name, source in everything.items()}


def check_settings(name: str, source: "Source", data: "Data", manifest: Manifest) -> None:
    """Raise DataError where both a path and text are given, and the tokens there were made of other text or otherwise.

    With a path alone, the tokens there are what they are. There may be more of them than asked for: max_tokens cuts.
    """
    if source.path is None or (source.source is None and source.hub is None):
        return
    wanted, found = settings(name, source, data), manifest.settings
    asked, there = wanted.get("max_tokens"), found.get("max_tokens")
    if there is not None and (asked is None or asked > there):
        remedy = f"Set data.max_tokens to as many, or give another path, or remove {source.path} to prepare more."
        raise DataError(f"the first {there:,} tokens alone were prepared, and more are asked for", source.path, remedy)
    names = sorted({*wanted, *found} - {"max_tokens", "shard_tokens"})
    if differing := [key for key in names if wanted.get(key) != found.get(key)]:
        differences = ", ".join(f"{key}: {found.get(key)} there, {wanted.get(key)} asked" for key in differing)
        remedy = "Give another path, or data.source=null data.hub=null to train on these tokens as they are."
        raise DataError(f"token files made with other settings ({differences})", source.path, remedy)


def _hashed(source: "Source") -> bool:
    return (source.validation_split if is_remote(source) else source.validation_files) is None


def _text(name: str, source: "Source") -> dict[str, Any]:
    if is_remote(source):
        keys = ("hub", "subset", "revision", "split", "validation_split", "text_field")
        return {key: getattr(source, key) for key in keys}
    if source.source is None:
        return {"corpus": name, "python": platform.python_version()}
    # the same whether the text still lies there: its tokens outlive it
    found = {"source": str(Path(source.source).resolve()), "text_field": source.text_field, "piece": [PIECE, PIECES]}
    patterns = {"files": source.files, "validation_files": source.validation_files}
    return found | patterns | {"suffixes": sorted(source.suffixes or ())}


def _tokenizer(data: "Data") -> dict[str, Any]:
    name = data.tokenizer
    if name == "bytes":
        return {"tokenizer": name}
    if name != "bpe":
        return {"tokenizer": name if is_on_hub(name) else _digest_of_file(name)}
    found: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": data.vocab_size}
    found["trained_on_bytes"] = sample_bytes(data.vocab_size)
    if data.sources or data.validation:
        # it is trained on the text of every source, and shared by the further validation sets
        texts = [_text(source_name, source) for source_name, source in train_sources(data).items()]
        found["trained_on"] = [*texts, data.validation_fraction]
    return found


def _digest_of_file(tokenizer: str) -> str:
    try:
        return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    except OSError as error:
        remedy = "Set data.tokenizer to `bpe`, `bytes`, the path of a tokenizer.json or a model of the hub."
        raise DataError(f"cannot read a tokenizer ({error.strerror})", tokenizer, remedy) from error
