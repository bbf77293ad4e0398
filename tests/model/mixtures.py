"""Decoders with experts in transformers: their configuration and their weights, by the names of the hub and by ours."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from depthlm.model.attention.delta import TAPS
from depthlm.model.shape import Backbone, Size

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM", "kimi_linear": "KimiLinearForCausalLM",
}  # fmt: skip
# ours and theirs, of which the first that a name contains applies
COMMON = {
    "embedding.": "model.embed_tokens.",
    "head.": "lm_head.",
    "final_norm.": "model.norm.",
    ".attention_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
}
MIXTURE = COMMON | {".attention.": ".self_attn.", ".mlp.router.": ".mlp.gate."}
KIMI = COMMON | {
    ".attention.kv_a_proj.": ".self_attn.kv_a_proj_with_mqa.",
    ".attention.kv_a_norm.": ".self_attn.kv_a_layernorm.",
    ".attention.": ".self_attn.",
    ".mlp.router.bias_e": ".block_sparse_moe.gate.e_score_correction_bias",
    ".mlp.router.": ".block_sparse_moe.gate.",
    ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
}
EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(\w+)\.weight")
STACKED = re.compile(r"(.+\.experts\.)(\w+)_proj")
W = {".gate_proj.weight": ".w1.weight", ".up_proj.weight": ".w3.weight", ".down_proj.weight": ".w2.weight"}


def kimi_settings(size: Size, backbone: Backbone) -> dict[str, Any]:
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


def settings(kind: str, size: Size, backbone: Backbone) -> dict[str, Any]:
    """Return the config.json of a decoder."""
    if kind == "kimi_linear":
        return kimi_settings(size, backbone)
    widths = {"intermediate_size": size.width_of_expert()}
    if kind == "qwen3_moe":
        widths = {"intermediate_size": size.intermediate_size, "moe_intermediate_size": size.width_of_expert()}
    return widths | {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size, "num_hidden_layers": size.num_layers, "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads, "head_dim": size.head_size, "num_experts": size.num_experts,
        "num_experts_per_tok": size.experts_per_token, "norm_topk_prob": backbone.router_normalize,
        "rms_norm_eps": backbone.norm_eps, "attention_bias": backbone.attention_bias, "hidden_act": "silu",
        "tie_word_embeddings": backbone.tie_embeddings, "max_position_embeddings": 128, "bos_token_id": None,
        "router_aux_loss_coef": backbone.router_balance_loss,
        "rope_parameters": {"rope_type": "default", "rope_theta": backbone.rope_theta},
    }  # fmt: skip


def export(kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the names and shapes of transformers, in a tensor for each expert."""
    parts, renamed = KIMI if kind == "kimi_linear" else MIXTURE, dict[str, Tensor]()
    for name, weight in split_experts(weights).items():
        new = name.replace("layers.", "model.layers.", 1)
        part = next((ours for ours in parts if new.startswith(ours) or (ours[0] == "." and ours in new)), "")
        new = new.replace(part, parts[part], 1) if part else new
        for ours, theirs in W.items() if kind == "kimi_linear" and ".mlp.experts." in name else ():
            new = new.replace(ours, theirs)
        weight = weight.unsqueeze(1) if name.endswith("conv1d.weight") else weight
        renamed[new] = weight.view(1, 1, -1, 1) if name.endswith(".A_log") else weight
    return renamed


def read(kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of transformers with our names and shapes."""
    parts, renamed = W | KIMI if kind == "kimi_linear" else MIXTURE, dict[str, Tensor]()
    for name, weight in weights.items():
        for ours, theirs in sorted(parts.items(), key=lambda part: -len(part[1])):
            name = name.replace(theirs, ours)
        # transformers also writes dense MLPs with this name
        name = name.replace(".block_sparse_moe.", ".mlp.").removeprefix("model.")
        weight = weight.squeeze(1) if name.endswith("conv1d.weight") else weight
        renamed[name] = weight.flatten() if name.endswith(".A_log") else weight
    return stack_experts(renamed)


def stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with those of all experts of a layer in three tensors, which checkpoints of the hub divide."""
    result, experts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, tensor in weights.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        else:
            result[name] = tensor
    for name, tensors in experts.items():
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
