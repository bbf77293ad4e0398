"""Kimi Linear in transformers and on the hub: entries of config.json without a single counterpart in our settings."""

from collections.abc import Mapping
from typing import Any

from depthlm.model.attention.delta import TAPS
from depthlm.model.shape import Backbone, Mixer, Size

# the names that transformers writes, and those of the hub
ALIASES = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
LINEAR = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def entries(size: Size, backbone: Backbone) -> dict[str, Any]:
    """Return the entries of its config.json that describe its layers."""
    mixers = backbone.mixers_of(size.num_layers)
    numbered = {name: [i + 1 for i, mixer in enumerate(mixers) if mixer == name] for name in ("latent", "delta")}
    return {
        "linear_attn_config": {
            "full_attn_layers": numbered["latent"],
            "kda_layers": numbered["delta"],
            "head_dim": size.head_size,
            "num_heads": size.num_heads,
            "short_conv_kernel_size": TAPS,
        },
        "num_key_value_heads": size.num_heads,
        "kv_lora_rank": size.width_of_latent(),
        "qk_rope_head_dim": size.width_of_shared_key(),
        "qk_nope_head_dim": size.head_size,
        "q_lora_rank": None,
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
    }


def normalize_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return its config.json with the names of the hub, the backbone settings of its layers, and what is unsupported.

    Raises KeyError if the layers of each kind are not listed.
    """
    config = dict(config) | {hub_name: config[name] for name, hub_name in ALIASES.items() if name in config}
    linear = {hub_name: config[name] for name, hub_name in LINEAR.items() if name in config}
    linear |= config.get("linear_attn_config") or {}
    names: list[Mixer]
    count, unsupported = config["num_hidden_layers"], []
    if "layer_types" in config:
        names = ["latent" if kind == "full_attention" else "delta" for kind in config["layer_types"]]
    else:
        latent = set(linear["full_attn_layers"])
        names = ["latent" if layer + 1 in latent else "delta" for layer in range(count)]
    if "mlp_layer_types" in config:
        kinds = config["mlp_layer_types"]
        dense = kinds.count("dense")
        config["first_k_dense_replace"] = dense
        if "dense" in kinds[dense:]:
            unsupported.append("layers without experts between those with experts")
    wanted = {"head_dim": config["v_head_dim"], "num_heads": config["num_attention_heads"]}
    for name, value in (wanted | {"short_conv_kernel_size": TAPS}).items():
        if linear.get(name, value) != value:
            unsupported.append(f"{name} {linear[name]} in its linear attention, where {value} would be supported")
    if config.get("qk_nope_head_dim", config["v_head_dim"]) != config["v_head_dim"]:
        unsupported.append("keys and values of different widths (qk_nope_head_dim, v_head_dim)")
    if config.get("q_lora_rank") is not None:
        unsupported.append("a latent of the queries (q_lora_rank)")
    if config.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        unsupported.append(f"moe_router_activation_func {config['moe_router_activation_func']}")
    if config.get("moe_layer_freq", 1) != 1:
        unsupported.append("layers without experts between those with experts")
    return config, {"mixers": pattern(names)}, unsupported


def pattern(names: list[Mixer]) -> list[Mixer]:
    """Return the shortest list of mixers that gives each layer its own."""
    backbones = (Backbone(mixers=names[:length]) for length in range(1, len(names) + 1))
    return next(backbone.mixers for backbone in backbones if backbone.mixers_of(len(names)) == names)
