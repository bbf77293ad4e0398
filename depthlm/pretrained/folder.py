"""Start a run from a Hugging Face folder: read its settings, and load its weights under our names.

This needs no transformers and unpickles nothing.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from depthlm.data import padded_vocab_size, vocab_size
from depthlm.errors import UserError
from depthlm.files import is_inside, read_text
from depthlm.model.settings import format_setting
from depthlm.pretrained.native import NATIVE, SHAPE, import_name, import_settings, stack_experts

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Pretrained(NamedTuple):
    """A Hugging Face folder with its model_type, weight files and settings.

    settings: {"size", "backbone", "model"} as in a run's configuration, with only the keys that determine what the
    weights compute. unsupported: features that depthlm does not support.
    """

    folder: Path
    model_type: str
    files: list[Path]
    settings: dict[str, dict[str, Any]]
    unsupported: list[str]


def is_pretrained(folder: Path) -> bool:
    """Return whether this is a Hugging Face folder and not a run directory."""
    return (folder / CONFIG).is_file()


def read_pretrained(folder: Path) -> Pretrained:
    """Read the settings and the list of files of a folder. Raises UserError for one that cannot initialize a run."""
    try:
        config = json.loads(read_text(folder / CONFIG))
        model_type = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"init_from={folder}: {CONFIG} is not the configuration of a model ({error!r})") from None
    if model_type not in (*NATIVE, "depthlm"):
        raise UserError(f"init_from={folder}: model_type {model_type}; allowed: {', '.join(NATIVE)}, depthlm")
    try:
        settings, unsupported = _settings_of_export(config) if model_type == "depthlm" else import_settings(config)
    except KeyError as error:
        raise UserError(f"init_from={folder}: {CONFIG} lacks {error}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"init_from={folder}: {CONFIG} has a value of a wrong type ({error})") from None
    if config.get("quantization_config"):
        unsupported.append("quantized weights")
    source = Pretrained(folder, model_type, _weight_files(folder), settings, unsupported)
    if settings["backbone"]["tie_embeddings"] and _has_separate_head(source):
        # as in transformers, the weights decide
        settings["backbone"]["tie_embeddings"] = False
    return source


def differences(source: Pretrained, groups: Mapping[str, Any]) -> list[str]:
    """Return errors for all settings with which these weights would compute something else; [] if there are none.

    Each error names its key, and the last one lists the overrides that fix them. Another mechanism is no error, since
    init_from can add a mechanism to a trained decoder.

    groups: size, backbone, model and data of the run.
    """
    errors = [f"init_from={source.folder}: it has {feature}, which is not supported" for feature in source.unsupported]
    fixes = []
    for part, imported in source.settings.items():
        configured = groups[part]
        if part == "model" and imported["name"] != configured.name:
            continue
        for key, value, run_value in _pairs(imported, configured):
            if value != run_value:
                errors.append(f"{part}.{key}={format_setting(run_value)}: the weights have {format_setting(value)}")
                fixes.append(f"{part}.{key}={format_setting(value)}")
    wanted = source.settings["size"]["vocab_size"]
    if vocab_size(groups["data"]) > wanted:
        tokenizer = source.folder / TOKENIZER
        fixes.append(f"data.tokenizer={tokenizer if tokenizer.is_file() else '<its tokenizer.json>'}")
    elif padded_vocab_size(groups["data"]) > wanted:
        fixes.append("data.pad_vocab_multiple=1")
    return (
        [*errors, f"init_from={source.folder}: to start from these weights, give {' '.join(fixes)}"] if errors else []
    )


def load_weights(source: Pretrained) -> dict[str, Tensor]:
    """Return the weights under our names, in the dtypes of the files, of which they are views.

    Raises UserError if a file cannot be read.
    """
    weights = {}
    for file in source.files:
        try:
            loaded = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"init_from={source.folder}: {file.name} cannot be read ({error})") from None
        for stored_name, tensor in loaded.items():
            if source.model_type == "depthlm":
                weights[stored_name.removeprefix("decoder.")] = tensor
            else:
                weights[import_name(source.model_type, stored_name)] = tensor
    try:
        weights = stack_experts(weights)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"init_from={source.folder}: the weights of the experts are incomplete ({error})") from None
    if source.settings["backbone"]["tie_embeddings"] and "head.weight" in weights:
        # some checkpoints contain the tied matrix twice, or under this name only
        weights.setdefault("embedding.weight", weights.pop("head.weight"))
    return weights


def _has_separate_head(source: Pretrained) -> bool:
    """Return whether the files contain an embedding and a head that differ."""
    matrices: dict[str, Tensor] = {}
    for file in source.files:
        # a file that cannot be read is reported when the weights are loaded
        with suppress(OSError, SafetensorError), safe_open(file, "pt") as stored:
            names = {"model.embed_tokens.weight", "lm_head.weight"} & {*stored.keys()}
            matrices |= {name: stored.get_tensor(name) for name in names}
    return len(matrices) == 2 and not torch.equal(*matrices.values())


def _settings_of_export(config: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    backbone = {key: value for key, value in config["backbone"].items() if key != "name"}
    mechanism = {key: config[key] for key in ("connection", "attention", "loops")}
    experts = ("num_experts", "experts_per_token") if backbone["mlp"] == "experts" else ()
    size = {key: config["size"][key] for key in (*SHAPE, *experts)}
    return {"size": size, "backbone": backbone, "model": {"name": config["mechanism"], **mechanism}}, []


def _pairs(imported: Mapping[str, Any], configured: Any) -> list[tuple[str, Any, Any]]:
    """Return (key, imported value, configured value) of comparable settings, those of a mechanism one by one."""
    pairs = []
    for key, value in imported.items():
        # an export of another version may have settings that this version does not have
        current: Any = getattr(configured, key, None)
        if isinstance(value, dict):
            pairs += [
                (f"{key}.{name}", setting, current[name]) for name, setting in value.items() if name in (current or {})
            ]
        else:
            pairs.append((key, value, current))
    return pairs


def _weight_files(folder: Path) -> list[Path]:
    index, names = folder / INDEX, [WEIGHTS]
    try:
        # as in transformers, an index beside the file is not read: it is from an earlier save
        if index.is_file() and not (folder / WEIGHTS).is_file():
            names = sorted({*json.loads(read_text(index))["weight_map"].values()})
        missing = [name for name in names if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"init_from={folder}: {INDEX} cannot be read ({error!r})") from None
    if missing and any(folder.glob("*.bin")):
        raise UserError(
            f"init_from={folder}: its weights are pickled (*.bin), which can contain code and is never loaded; convert "
            "them to safetensors with transformers, by from_pretrained and then save_pretrained to a new folder"
        )
    if missing:
        raise UserError(f"init_from={folder}: {missing[0]} is missing")
    if outside := [name for name in names if not is_inside(folder / name, folder)]:
        raise UserError(f"init_from={folder}: {outside[0]} is not inside the folder; copy it there, and name it alone")
    return [folder / name for name in names]
