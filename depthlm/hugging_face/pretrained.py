"""A folder of Hugging Face as the start of a run: what its weights mean, and the weights under our names.

Needs no transformers, and unpickles nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer as Encoder
from torch import Tensor

from depthlm.data import padded_vocab_size, vocab_size
from depthlm.errors import UserError
from depthlm.hugging_face.native import NATIVE, SHAPE, our_name, our_settings
from depthlm.model.settings import shown

if TYPE_CHECKING:
    from depthlm.config import Config

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Pretrained(NamedTuple):
    """A folder, its model_type, its files of weights, and {"size", "backbone", "model"} as a run's config has them.

    A part holds the keys alone that give weights their meaning. beyond: what no decoder of ours computes.
    """

    folder: Path
    model_type: str
    files: list[Path]
    settings: dict[str, dict[str, Any]]
    beyond: list[str]


def is_pretrained(folder: Path) -> bool:
    """Whether it is such a folder, and no run directory."""
    return (folder / CONFIG).is_file()


def read_pretrained(folder: Path) -> Pretrained:
    """What config.json and the list of files say. Raises UserError for what cannot be the start of a run."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        model_type = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"import_from={folder}: {CONFIG} is not that of a model ({error!r})") from None
    if model_type not in (*NATIVE, "depthlm"):
        raise UserError(f"import_from={folder}: model_type {model_type}; allowed: {', '.join(NATIVE)}, depthlm")
    try:
        settings, beyond = _own_settings(config) if model_type == "depthlm" else our_settings(config)
    except (KeyError, TypeError) as error:
        raise UserError(f"import_from={folder}: {CONFIG} lacks {error}") from None
    if config.get("quantization_config"):
        beyond.append("quantized weights")
    return Pretrained(folder, model_type, _weight_files(folder), settings, beyond)


def differences(source: Pretrained, config: "Config") -> list[str]:
    """Where these weights would compute something else in the model of a configuration, each with its key; none: [].

    Another mechanism is no difference: import_from gives a trained decoder one. The last line has the overrides.
    """
    errors = [f"import_from={source.folder}: {what} of its weights is not supported" for what in source.beyond]
    mending = []
    for part, theirs in source.settings.items():
        ours = getattr(config, part)
        if part == "model" and theirs["name"] != ours.name:
            continue
        for key, value, given in _pairs(theirs, ours):
            if value != given:
                errors.append(f"{part}.{key}={shown(given)}: the weights have {shown(value)}")
                mending.append(f"{part}.{key}={shown(value)}")
    wanted = source.settings["size"]["vocab_size"]
    if vocab_size(config.data) > wanted:
        own = source.folder / TOKENIZER
        mending.append(f"data.tokenizer={own if own.is_file() else '<its tokenizer.json>'}")
    elif padded_vocab_size(config.data) > wanted:
        mending.append("data.pad_vocab_multiple=1")
    return (
        [*errors, f"import_from={source.folder}: to go on with its weights, give {' '.join(mending)}"] if errors else []
    )


def check_tokens(source: Pretrained, run: Path) -> None:
    """Raises UserError where a token of this run directory's tokenizer has another id, or none, in the folder's.

    Where either has no tokenizer.json, there is nothing to compare.
    """
    files = run / TOKENIZER, source.folder / TOKENIZER
    if not all(file.is_file() for file in files):
        return
    try:
        ours, theirs = (Encoder.from_file(str(file)).get_vocab() for file in files)
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"import_from={source.folder}: {TOKENIZER} is no tokenizer ({error})") from None
    token = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if token is not None:
        raise UserError(
            f"import_from={source.folder}: its tokenizer is another: {token!r} is {theirs.get(token, 'none')} there "
            f"and {ours[token]} here; give data.tokenizer={files[1]}"
        )


def load_weights(source: Pretrained, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The weights under our names, in the types of the files. Raises UserError where a file cannot be read."""
    weights = {}
    for file in source.files:
        try:
            loaded = load_file(file, device=str(device))
        except (OSError, SafetensorError) as error:
            raise UserError(f"import_from={source.folder}: {file.name} cannot be read ({error})") from None
        for name, tensor in loaded.items():
            own = source.model_type == "depthlm"
            weights[name.removeprefix("decoder.") if own else our_name(source.model_type, name)] = tensor
    if source.settings["backbone"]["tie_embeddings"]:
        # some checkpoints have the one matrix twice
        weights.pop("head.weight", None)
    return weights


def _own_settings(config: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    backbone = {key: value for key, value in config["backbone"].items() if key != "name"}
    mechanism = {key: config[key] for key in ("connection", "attention", "loops")}
    size = {key: config["size"][key] for key in SHAPE}
    return {"size": size, "backbone": backbone, "model": {"name": config["mechanism"], **mechanism}}, []


def _pairs(theirs: Mapping[str, Any], ours: Any) -> list[tuple[str, Any, Any]]:
    """(key, their value, our value) of what can be told apart, settings of a mechanism one by one."""
    pairs = []
    for key, value in theirs.items():
        # another version's export may have what this one does not know
        given: Any = getattr(ours, key, None)
        if isinstance(value, dict):
            pairs += [(f"{key}.{name}", one, given[name]) for name, one in value.items() if name in (given or {})]
        else:
            pairs.append((key, value, given))
    return pairs


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"import_from={folder}: {INDEX} cannot be read ({error!r})") from None
    else:
        names = [WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and any(folder.glob("*.bin")):
        raise UserError(
            f"import_from={folder}: its weights are pickled (*.bin), which is code and never loaded; in transformers, "
            "from_pretrained and then save_pretrained to a new folder makes safetensors of them"
        )
    if missing:
        raise UserError(f"import_from={folder}: {missing[0]} is missing")
    return [folder / name for name in names]
