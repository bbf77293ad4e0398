"""Kimi Linear in transformers: its configuration and its weights, by the names of the hub and by ours."""

from typing import Any

from torch import Tensor

from depthlm.model.attention.delta import TAPS
from depthlm.model.shape import Backbone, Size

# ours and theirs, of which the first that a name contains applies
PARTS = {
    "embedding.": "model.embed_tokens.",
    "head.": "lm_head.",
    "final_norm.": "model.norm.",
    ".attention_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attention.kv_a_proj.": ".self_attn.kv_a_proj_with_mqa.",
    ".attention.kv_a_norm.": ".self_attn.kv_a_layernorm.",
    ".attention.": ".self_attn.",
    ".mlp.router.bias_e": ".block_sparse_moe.gate.e_score_correction_bias",
    ".mlp.router.": ".block_sparse_moe.gate.",
    ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
}
EXPERT = {".gate_proj.weight": ".w1.weight", ".up_proj.weight": ".w3.weight", ".down_proj.weight": ".w2.weight"}


def settings(size: Size, backbone: Backbone) -> dict[str, Any]:
    """Return the config.json of a decoder."""
    mixers = backbone.mixers_of(size.num_layers)
    numbers = {name: [i + 1 for i, mixer in enumerate(mixers) if mixer == name] for name in ("latent", "delta")}
    return {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size, "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers, "num_attention_heads": size.num_heads, "v_head_dim": size.head_size,
        "num_key_value_heads": size.num_heads, "num_experts": size.num_experts,
        "num_experts_per_token": size.experts_per_token, "moe_intermediate_size": size.width_of_expert(),
        "kv_lora_rank": size.width_of_latent(), "qk_rope_head_dim": size.width_of_shared_key(),
        "qk_nope_head_dim": size.head_size, "q_lora_rank": None, "mla_use_nope": True, "moe_layer_freq": 1,
        "rms_norm_eps": backbone.norm_eps, "num_shared_experts": backbone.shared_experts,
        "first_k_dense_replace": backbone.dense_layers, "moe_renormalize": backbone.router_normalize,
        "routed_scaling_factor": backbone.router_scale, "num_expert_group": backbone.router_groups,
        "topk_group": backbone.router_groups_kept, "moe_router_activation_func": "sigmoid", "hidden_act": "silu",
        "max_position_embeddings": 128, "bos_token_id": None,
        "linear_attn_config": {
            "full_attn_layers": numbers["latent"], "kda_layers": numbers["delta"], "head_dim": size.head_size,
            "num_heads": size.num_heads, "short_conv_kernel_size": TAPS,
        },
    }  # fmt: skip


def export(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Return the name and the shape of a weight in transformers."""
    renamed = name.replace("layers.", "model.layers.", 1)
    part = next((ours for ours in PARTS if renamed.startswith(ours) or (ours[0] == "." and ours in renamed)), "")
    renamed = renamed.replace(part, PARTS[part], 1) if part else renamed
    for ours, theirs in EXPERT.items() if ".mlp.experts." in name else ():
        renamed = renamed.replace(ours, theirs)
    weight = weight.unsqueeze(1) if name.endswith("conv1d.weight") else weight
    return renamed, weight.view(1, 1, -1, 1) if name.endswith(".A_log") else weight


def read(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Return our name and shape of a weight of transformers."""
    for ours, theirs in (EXPERT | dict(sorted(PARTS.items(), key=lambda part: -len(part[1])))).items():
        name = name.replace(theirs, ours)
    # transformers also writes dense MLPs with this name
    name = name.replace(".block_sparse_moe.", ".mlp.").removeprefix("model.")
    weight = weight.squeeze(1) if name.endswith("conv1d.weight") else weight
    return name, weight.flatten() if name.endswith(".A_log") else weight
