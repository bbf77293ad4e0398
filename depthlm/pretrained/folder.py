"""Decoders that are part of transformers, dense Qwen3 and OLMo2, and Hugging Face folders that a run can start from.

Converts names of weights and settings both ways. This needs no transformers and unpickles nothing.
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
from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.decoder import Decoder
from depthlm.model.settings import format_setting
from depthlm.model.shape import Backbone, Size

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# our sizes and backbone fields, and the names that they have in a config.json
SHAPE = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
}
KEYS = {"norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings", "attention_bias": "attention_bias"}
# backbone fields that both classes have, and the defaults of others for a config.json that lacks them
FIXED = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "mlp_bias": False, "head_bias": False}
DEFAULTS = {"rope_theta": 10000.0, "attention_bias": False, "tie_embeddings": False}
# our backbone fields that do not determine what the weights compute
OF_TRAINING = {"name", "dropout", "init", "bias_init_std", "router_balance_loss", "router_z_loss"}
# the beginnings of the names of weights, and parts of them
BEGINNINGS = {
    "embedding.": "model.embed_tokens.",
    "head.": "lm_head.",
    "final_norm.": "model.norm.",
    "layers.": "model.layers.",
}


class Native(NamedTuple):
    """A transformers class: its name, the backbone fields that it has, and its names of the two norms of a layer.

    norm_eps: where a config.json has none.
    """

    architecture: str
    backbone: dict[str, Any]
    norm_eps: float
    attention_norm: str
    mlp_norm: str

    @property
    def parts(self) -> dict[str, str]:
        """The parts of our names of weights, and those of transformers."""
        norms = {".attention_norm.": f".{self.attention_norm}.", ".mlp_norm.": f".{self.mlp_norm}."}
        return norms | {".attention.": ".self_attn."}


NATIVE = {
    "qwen3": Native(
        "Qwen3ForCausalLM",
        FIXED | {"norm_placement": "pre", "qk_norm": "head"},
        1e-6,
        "input_layernorm",
        "post_attention_layernorm",
    ),
    "olmo2": Native(
        "Olmo2ForCausalLM",
        FIXED | {"norm_placement": "post", "qk_norm": "full"},
        1e-5,
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
}


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
            # another mechanism, on the same number of passes
            imported = {"loops": imported["loops"]}
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
    backbone = {key: value for key, value in config["backbone"].items() if key not in OF_TRAINING}
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


def native_type(model: Decoder) -> str | None:
    """Return the model_type of transformers that is equivalent to this decoder; None if there is none."""
    plain = all(type(connection) is Residual for connection in model.connections) and all(
        type(layer.attention) is SelfAttention for layer in model.layers
    )
    if not plain or model.loops > 1 or model.end_of_text is not None:
        return None
    matching = (
        name
        for name, native in NATIVE.items()
        if all(getattr(model.backbone, key) == value for key, value in native.backbone.items())
    )
    return next(matching, None)


def native_config(model_type: str, size: Size, backbone: Backbone, max_length: int) -> dict[str, Any]:
    """Return the config.json of such a decoder. It has rope_theta twice, for transformers 5 and earlier versions."""
    theta = backbone.rope_theta
    return {
        "architectures": [NATIVE[model_type].architecture],
        "model_type": model_type,
        **{hf_name: getattr(size, name) for name, hf_name in SHAPE.items()},
        **{hf_name: getattr(backbone, name) for name, hf_name in KEYS.items()},
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "initializer_range": size.init_std,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
    }


def import_settings(config: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return size, backbone and model of a config.json of transformers, and the features that are not supported.

    Raises KeyError if a width or count is missing.
    """
    native = NATIVE[config["model_type"]]
    theta, unsupported = _rope(config)
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        unsupported.append("sliding-window attention")
    if config.get("hidden_act", "silu") != "silu":
        unsupported.append(f"hidden_act {config['hidden_act']}")
    size = {name: config[hf_name] for name, hf_name in SHAPE.items() if name not in ("num_kv_heads", "head_size")}
    size["num_kv_heads"] = config.get("num_key_value_heads") or size["num_heads"]
    head_size = config.get("head_dim") or (128 if config["model_type"] == "qwen3" else None)
    size["head_size"] = head_size or size["hidden_size"] // size["num_heads"]
    backbone = native.backbone | DEFAULTS | {"norm_eps": native.norm_eps, "mixers": ["attention"]}
    backbone |= {name: config[hf_name] for name, hf_name in KEYS.items() if hf_name in config}
    backbone |= {} if theta is None else {"rope_theta": theta}
    return {"size": size, "backbone": backbone, "model": {"name": "vanilla", "loops": 1}}, unsupported


def import_name(model_type: str, name: str) -> str:
    """Return our name of a weight of transformers."""
    beginnings, parts = (
        {theirs: ours for ours, theirs in names.items()} for names in (BEGINNINGS, NATIVE[model_type].parts)
    )
    return _rename(name, beginnings, parts)


def export_name(model_type: str, name: str) -> str:
    """Return the name of a weight in transformers."""
    return _rename(name, BEGINNINGS, NATIVE[model_type].parts)


def _rope(config: Mapping[str, Any]) -> tuple[float | None, list[str]]:
    """Return rope_theta as transformers reads it, None if it is not given, and the features that are not supported.

    `rope_scaling` comes before `rope_parameters`, which may have parameters for each type of layers, and `type` is an
    earlier name of `rope_type`.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    layer_types = config.get("layer_types") or ["full_attention"]
    parameters = [rope[name] for name in dict.fromkeys(layer_types) if name in rope] or [rope]
    kinds = dict.fromkeys(entry.get("rope_type", entry.get("type", "default")) for entry in parameters)
    thetas = dict.fromkeys(entry.get("rope_theta", config.get("rope_theta")) for entry in parameters)
    unsupported = [f"rope scaling {kind}" for kind in kinds if kind != "default"]
    if len(thetas) > 1:
        unsupported.append(f"several values of rope_theta ({', '.join(map(str, thetas))})")
    return next(iter(thetas)), unsupported


def _rename(name: str, beginnings: Mapping[str, str], parts: Mapping[str, str]) -> str:
    begin = next((text for text in beginnings if name.startswith(text)), "")
    part = next((text for text in parts if text in name), "")
    name = beginnings.get(begin, "") + name.removeprefix(begin)
    return name.replace(part, parts[part], 1) if part else name
