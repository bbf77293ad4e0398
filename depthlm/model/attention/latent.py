"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) without positions, as in Kimi Linear.

Shapes: b batch, t new tokens, d hidden size, h heads, e head size, s width of the shared part of the keys, r width of
the latent.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from depthlm.model.layers import Linear, Norm
from depthlm.model.shape import Backbone, Size
from depthlm.ops.functions import linear, linear_together

# of the norm of the latent, in DeepSeek-V2 and in Kimi Linear, whose other norms have 1e-5
LATENT_EPS = 1e-6


def add_projections(module: nn.Module, size: Size, backbone: Backbone) -> None:
    """Give an attention the projections of its queries, keys and values. Each head has keys and values of its own.

    x -> q_proj -----------------------------------------> q_bht(e+s)
      -> kv_a_proj --> latent_btr -> kv_a_norm -> kv_b_proj -> key_bhte, v_bhte
                  `--> shared_bts, the same for all heads ------------> k = (key, shared)
    """
    h, e, r = size.num_heads, size.head_size, size.width_of_latent()
    module.q_proj = Linear(size.hidden_size, h * (e + size.width_of_shared_key()), bias=False)
    module.kv_a_proj = Linear(size.hidden_size, r + size.width_of_shared_key(), bias=False)
    module.kv_a_norm = Norm(r, replace(backbone, norm="rmsnorm", norm_eps=LATENT_EPS))
    module.kv_b_proj = Linear(r, 2 * h * e, bias=False)


def project_latent(attention: Any, q_in: Tensor, k_in: Tensor, v_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_bht(e+s), k_bht(e+s) and v_bhte. If keys and values have inputs of their own, so do their latents."""
    q_proj, kv_a_proj, kv_b_proj = attention.q_proj, attention.kv_a_proj, attention.kv_b_proj
    kv_a_norm = attention.kv_a_norm
    h, r = attention.num_heads, kv_b_proj.in_features
    if q_in is k_in:
        q, latent_and_shared = linear_together(q_in, q_proj, kv_a_proj)
    else:
        q, latent_and_shared = q_proj(q_in), kv_a_proj(k_in)
    latent_btr, shared_bts = latent_and_shared[..., :r], latent_and_shared[..., r:]
    if k_in is v_in:
        key, v = kv_b_proj(kv_a_norm(latent_btr)).unflatten(-1, (h, -1)).chunk(2, dim=-1)
    else:
        weights = kv_b_proj.weight.unflatten(0, (h, -1)).chunk(2, dim=1)
        latents = kv_a_norm(latent_btr), kv_a_norm(linear(v_in, kv_a_proj.weight[:r]))
        key, v = (
            linear(x, weight.flatten(0, 1)).unflatten(-1, (h, -1)) for x, weight in zip(latents, weights, strict=True)
        )
    k = torch.cat((key, shared_bts.unsqueeze(2).expand(-1, -1, h, -1)), dim=-1)
    return q.unflatten(-1, (h, -1)).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
