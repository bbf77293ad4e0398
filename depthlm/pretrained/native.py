"""Decoders that are part of transformers: dense Qwen3 and OLMo2, and their mixtures of experts.

Converts names of weights and settings both ways.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.decoder import Decoder
from depthlm.model.shape import Backbone, Size

# backbone fields that both classes have as settings, with the defaults for a config.json that lacks them
FREE = {"norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False, "tie_embeddings": False}
KEYS = {"norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings", "attention_bias": "attention_bias"}
FIXED = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "mlp_bias": False, "head_bias": False}
SHAPE = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
}
EXPERTS = FIXED | {
    "mlp": "experts",
    "norm_placement": "pre",
    "dense_layers": 0,
    "shared_experts": 0,
    "router_scores": "softmax",
    "router_scale": 1.0,
    "router_groups_kept": 1,
    "router_groups": 1,
    "router_bias_rate": 0.0,
}
NORMS = {".attention_norm.": ".input_layernorm.", ".mlp_norm.": ".post_attention_layernorm."}
ROUTER = {".mlp.router.": ".mlp.gate."}
MIXTURE = {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(\w+)\.weight")
STACKED = re.compile(r"(.+\.experts\.)(\w+)_proj")


class Native(NamedTuple):
    """A transformers class: its name, the fixed backbone fields, and the defaults of others.

    sizes, keys: its names of our sizes and backbone fields. names: of the parts of our weights' names.
    """

    architecture: str
    backbone: dict[str, Any]
    defaults: dict[str, Any]
    names: dict[str, str]
    sizes: dict[str, str] = SHAPE
    keys: dict[str, str] = KEYS


NATIVE = {
    "qwen3": Native("Qwen3ForCausalLM", FIXED | {"norm_placement": "pre", "qk_norm": "head"}, FREE, NORMS),
    "olmo2": Native(
        "Olmo2ForCausalLM",
        FIXED | {"norm_placement": "post", "qk_norm": "full"},
        FREE | {"norm_eps": 1e-5},
        {".attention_norm.": ".post_attention_layernorm.", ".mlp_norm.": ".post_feedforward_layernorm."},
    ),
    "qwen3_moe": Native(
        "Qwen3MoeForCausalLM",
        EXPERTS | {"qk_norm": "head"},
        FREE | {"router_normalize": False},
        NORMS | ROUTER,
        SHAPE | MIXTURE | {"expert_size": "moe_intermediate_size"},
        KEYS | {"router_normalize": "norm_topk_prob"},
    ),
    "olmoe": Native(
        "OlmoeForCausalLM",
        EXPERTS | {"qk_norm": "full"},
        FREE | {"norm_eps": 1e-5, "router_normalize": False},
        NORMS | ROUTER,
        {name: hf_name for name, hf_name in SHAPE.items() if name != "intermediate_size"}
        | MIXTURE
        | {"expert_size": "intermediate_size"},
        KEYS | {"router_normalize": "norm_topk_prob"},
    ),
}


def native_type(model: Decoder) -> str | None:
    """Return the model_type of transformers that is equivalent to this decoder; None if there is none."""
    plain = all(type(connection) is Residual for connection in model.connections) and all(
        type(layer.attention) is SelfAttention for layer in model.layers
    )
    if not plain or model.loops > 1 or model.end_of_text is not None:
        return None
    matching = [
        name
        for name, native in NATIVE.items()
        if all(getattr(model.backbone, key) == value for key, value in native.backbone.items())
    ]
    if matching == ["olmoe"] and model.size.num_heads * model.size.head_size != model.size.hidden_size:
        return None
    return matching[0] if matching else None


def native_config(model_type: str, size: Size, backbone: Backbone, max_length: int) -> dict[str, Any]:
    """Return the config.json of such a decoder. It has rope_theta twice, for transformers 5 and earlier versions."""
    theta, native = backbone.rope_theta, NATIVE[model_type]
    settings = {
        "architectures": [native.architecture],
        "model_type": model_type,
        **{hf_name: getattr(size, name) for name, hf_name in native.sizes.items()},
        **{hf_name: getattr(backbone, name) for name, hf_name in native.keys.items()},
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "initializer_range": size.init_std,
        "bos_token_id": None,
    }
    if "expert_size" in native.sizes:
        settings |= {native.sizes["expert_size"]: size.width_of_expert()}
    if backbone.mlp == "experts":
        settings |= {"router_aux_loss_coef": backbone.router_balance_loss}
    return settings | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta}


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
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        unsupported.append("layers without experts between those with experts")
    if config.get("clip_qkv") is not None:
        unsupported.append("clipped queries, keys and values (clip_qkv)")
    sizes = dict(native.sizes)
    if "num_experts" in sizes and "num_experts" not in config:
        # as transformers 5 writes it
        sizes["num_experts"] = "num_local_experts"
    if native.backbone["mlp"] == "experts":
        # no layer has an MLP of this width
        sizes.pop("intermediate_size", None)
    size = {name: config[hf_name] for name, hf_name in sizes.items() if name not in ("num_kv_heads", "head_size")}
    size["num_kv_heads"] = config.get("num_key_value_heads") or size["num_heads"]
    head_size = config.get("head_dim") or (128 if config["model_type"] == "qwen3" else None)
    size["head_size"] = head_size or size["hidden_size"] // size["num_heads"]
    backbone = native.backbone | native.defaults | {"mixers": ["attention"]}
    backbone |= {name: config[hf_name] for name, hf_name in native.keys.items() if hf_name in config}
    backbone |= {} if theta is None else {"rope_theta": theta}
    return {"size": size, "backbone": backbone, "model": {"name": "vanilla"}}, unsupported


def import_name(model_type: str, name: str) -> str:
    """Return our name of a weight of transformers."""
    return _rename(name, {hf_name: name for name, hf_name in _names(model_type).items()})


def export_name(model_type: str, name: str) -> str:
    """Return the name of a weight in transformers."""
    return _rename(name, _names(model_type))


def stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with those of all experts of a layer in three tensors, which checkpoints of the hub divide.

    Also splits `gate_up_proj`, in which transformers keeps the first two in memory. Raises ValueError if an expert is
    missing.
    """
    result, experts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, tensor in weights.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        elif (match := STACKED.fullmatch(name)) and match[2] == "gate_up":
            result |= dict(zip((f"{match[1]}gate_proj", f"{match[1]}up_proj"), tensor.chunk(2, 1), strict=True))
        else:
            result[name] = tensor
    for name, tensors in experts.items():
        if tensors.keys() != set(range(len(tensors))):
            raise ValueError(f"{name}: there are experts {', '.join(map(str, sorted(tensors)))}, and no others")
        result[name] = torch.stack([tensors[number] for number in range(len(tensors))])
    return result


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with a tensor for each expert, as in checkpoints of the hub."""
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if match := STACKED.fullmatch(name):
            result |= {f"{match[1]}{number}.{match[2]}_proj.weight": expert for number, expert in enumerate(tensor)}
        else:
            result[name] = tensor
    return result


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


def _names(model_type: str) -> dict[str, str]:
    """Map the beginnings and parts of our names to those of transformers. The first part that a name has applies."""
    beginnings = {"embedding.": "model.embed_tokens.", "head.": "lm_head.", "final_norm.": "model.norm."}
    return beginnings | {"layers.": "model.layers."} | NATIVE[model_type].names | {".attention.": ".self_attn."}


def _rename(name: str, names: Mapping[str, str]) -> str:
    begin = next((text for text in names if not text.startswith(".") and name.startswith(text)), "")
    part = next((text for text in names if text.startswith(".") and text in name), "")
    name = names.get(begin, "") + name.removeprefix(begin)
    return name.replace(part, names[part], 1) if part else name
