"""Which token files a configuration means: the settings that decide their bytes, and the folder named by them."""

import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthlm.data.corpora import PIECE, PIECES
from depthlm.data.errors import DataError
from depthlm.data.manifest import VERSION, Manifest

if TYPE_CHECKING:
    from depthlm.config.schema import Data


def settings(data: "Data") -> dict[str, Any]:
    """Everything that the bytes of the token files follow from, the text aside. Raises DataError for no tokenizer."""
    found: dict[str, Any] = {"version": VERSION, "validation_fraction": data.validation_fraction}
    if data.source is None:
        found |= {"corpus": data.name, "python": platform.python_version()}
    else:
        source = Path(data.source).resolve()
        found |= {"source": str(source)}
        found |= {"piece": [PIECE, PIECES]} if source.is_file() else {"suffixes": sorted(data.suffixes)}
    if data.tokenizer == "bpe":
        return found | {"tokenizer": "bpe", "vocab_size": data.vocab_size}
    return found | {"tokenizer": "bytes" if data.tokenizer == "bytes" else _digest_of_file(data.tokenizer)}


def token_folder(data: "Data") -> Path:
    """data.path, or data/tokens/<name>-<digest of the settings> below the current folder."""
    if data.path:
        return Path(data.path)
    digest = hashlib.sha256(json.dumps(settings(data), sort_keys=True).encode()).hexdigest()[:8]
    return Path("data", "tokens", f"{data.name}-{digest}")


def check_settings(data: "Data", manifest: Manifest) -> None:
    """Raise DataError where both data.path and data.source are given and the tokens there were made otherwise.

    With data.path alone, the tokens there are what they are.
    """
    if data.path is None or data.source is None:
        return
    wanted = settings(data)
    names = [name for name in wanted | manifest.settings if wanted.get(name) != manifest.settings.get(name)]
    if names:
        differences = ", ".join(f"{n}: {manifest.settings.get(n)} there, {wanted.get(n)} asked" for n in names)
        remedy = "Give another data.path, or data.source=null to train on these tokens as they are."
        raise DataError(f"token files made with other settings ({differences})", data.path, remedy)


def _digest_of_file(tokenizer: str) -> str:
    try:
        return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    except OSError as error:
        remedy = "Set data.tokenizer to `bpe`, `bytes` or the path of a tokenizer.json."
        raise DataError(f"cannot read a tokenizer ({error.strerror})", tokenizer, remedy) from error
