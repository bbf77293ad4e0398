"""Decoders that are part of transformers: dense Qwen3 and OLMo2, and their mixtures of experts.

Converts names of weights and settings both ways.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.connections.residual import Residual
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


EXPERTS = FIXED | {"mlp": "experts", "norm_placement": "pre", "dense_layers": 0, "shared_experts": 0,
                   "router_scores": "softmax", "router_scale": 1.0, "router_groups_kept": 1, "router_groups": 1,
                   "router_bias_rate": 0.0}  # fmt: skip
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


class Native(NamedTuple):
    """A transformers class: its name, the fixed backbone fields, the defaults of others, and its names of our norms.

    expert_size: its name of the width of an expert; None without experts.
    """

    architecture: str
    backbone: dict[str, Any]
    defaults: dict[str, Any]
    norms: dict[str, str]
    expert_size: str | None = None

    def shape(self) -> dict[str, str]:
        """Return its names of our sizes."""
        if self.expert_size is None:
            return SHAPE
        shape = SHAPE | {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
        return {ours: theirs for ours, theirs in shape.items() if theirs != self.expert_size} | {
            "expert_size": self.expert_size
        }

    def keys(self) -> dict[str, str]:
        """Return its names of our backbone fields."""
        return KEYS if self.expert_size is None else KEYS | {"router_normalize": "norm_topk_prob"}


NATIVE = {
    "qwen3": Native(
        "Qwen3ForCausalLM",
        FIXED | {"norm_placement": "pre", "qk_norm": "head"},
        FREE,
        NORMS,
    ),
    "olmo2": Native(
        "Olmo2ForCausalLM",
        FIXED | {"norm_placement": "post", "qk_norm": "full"},
        FREE | {"norm_eps": 1e-5},
        {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    ),
    "qwen3_moe": Native(
        "Qwen3MoeForCausalLM",
        EXPERTS | {"qk_norm": "head"},
        FREE | {"router_normalize": False},
        NORMS,
        "moe_intermediate_size",
    ),
    "olmoe": Native(
        "OlmoeForCausalLM",
        EXPERTS | {"qk_norm": "full"},
        FREE | {"norm_eps": 1e-5, "router_normalize": False},
        NORMS,
        "intermediate_size",
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
    return {
        "architectures": [native.architecture],
        "model_type": model_type,
        **{theirs: getattr(size, ours) for ours, theirs in native.shape().items()},
        **{theirs: getattr(backbone, ours) for ours, theirs in native.keys().items()},
        **({"router_aux_loss_coef": backbone.router_balance_loss} if native.expert_size else {}),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "initializer_range": size.init_std,
        "bos_token_id": None,
    }


def our_settings(config: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return size, backbone and model of a config.json of transformers, and the features that are not supported.

    Raises KeyError if a width or count is missing.
    """
    native = NATIVE[config["model_type"]]
    rope = config.get("rope_parameters") or {}
    scaling = rope.get("rope_type", "default") if rope else config.get("rope_scaling")
    beyond = []
    if scaling not in (None, "default"):
        beyond.append(f"rope scaling {scaling}")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        beyond.append("sliding-window attention")
    if config.get("hidden_act", "silu") != "silu":
        beyond.append(f"hidden_act {config['hidden_act']}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        beyond.append("layers without experts between those with experts")
    if config.get("clip_qkv") is not None:
        beyond.append("clipped queries, keys and values (clip_qkv)")
    shape = native.shape()
    if native.expert_size is not None and "num_experts" not in config:
        # as transformers 5 writes it
        shape["num_experts"] = "num_local_experts"
    size = {ours: config[theirs] for ours, theirs in shape.items() if ours not in ("num_kv_heads", "head_size")}
    if native.expert_size is not None:
        # no layer has an MLP of this width
        size.pop("intermediate_size", None)
    size["num_kv_heads"] = config.get("num_key_value_heads") or size["num_heads"]
    head_size = config.get("head_dim") or (128 if config["model_type"].startswith("qwen3") else None)
    size["head_size"] = head_size or size["hidden_size"] // size["num_heads"]
    backbone = native.backbone | native.defaults
    backbone |= {ours: config[theirs] for ours, theirs in native.keys().items() if theirs in config}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    backbone |= {} if theta is None else {"rope_theta": theta}
    return {"size": size, "backbone": backbone, "model": {"name": "vanilla"}}, beyond


def our_name(model_type: str, name: str) -> str:
    """Return our name of one of their weights."""
    renamed = _renamed(name, {theirs: ours for ours, theirs in _names(model_type).items()})
    return renamed.replace(".mlp.gate.", ".mlp.router.")


def their_name(model_type: str, name: str) -> str:
    """Return their name of one of our weights."""
    return _renamed(name, _names(model_type)).replace(".mlp.router.", ".mlp.gate.")


def _names(model_type: str) -> dict[str, str]:
    """Map our names to theirs. A key is the start of a name or, if it starts with a dot, the part after the layer."""
    norms = {f".{ours}.": f".{theirs}." for ours, theirs in NATIVE[model_type].norms.items()}
    return {
        "embedding.": "model.embed_tokens.",
        "head.": "lm_head.",
        "final_norm.": "model.norm.",
        "layers.": "model.layers.",
        ".attention.": ".self_attn.",
        **norms,
    }


def _renamed(name: str, names: dict[str, str]) -> str:
    match = re.match(r"((?:model\.)?layers\.)(\d+)(\.\w+\.)", name)
    if match is None:
        begin = next((text for text in names if name.startswith(text)), "")
        return names.get(begin, "") + name[len(begin) :]
    layers, number, part = match.groups()
    return names.get(layers, layers) + number + names.get(part, part) + name[match.end() :]
