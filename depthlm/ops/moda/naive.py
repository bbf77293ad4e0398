"""Attention over the sequence and over depth in one softmax (MoDA, arXiv 2603.15619), from materialized scores.

    p_i = softmax([q_i . k_1, ..., q_i . k_i, q_i . key_1i, ..., q_i . key_ni] / sqrt(e)),
    o_i = sum_{j<=i} p_ij v_j + sum_{j=1..n} p_i(i+j) value_ji

This also runs where no flash attention does, as in fp32 on a GPU.

Shapes: b batch, t new tokens, s cached and new tokens, h query heads, k key/value heads, e head size, n depth entries,
x the s tokens and then the n entries.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthlm.ops.dtypes import upcast

Pair = tuple[Tensor, Tensor]


def attend_with_scores(
    q_bhte: Tensor,
    k_bkse: Tensor,
    v_bkse: Tensor,
    depth: Sequence[Pair],
    mask_b1ts: Tensor | None = None,
    edit: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return attended_bhte of the last t of s tokens.

    Each token attends to itself and to all tokens before it, and to the depth entries at its own position.
    depth: n pairs (k_bkte, v_bkte). mask_b1ts: replaces the causal mask. edit: returns the
    probabilities to use in place of p_bhtx.
    """
    s, groups = k_bkse.shape[2], q_bhte.shape[1] // k_bkse.shape[1]
    p = probabilities(q_bhte, k_bkse, [key for key, _ in depth], mask_b1ts)
    p = p if edit is None else edit(p)
    attended = p[..., :s] @ _repeat(v_bkse, groups)
    for j, (_, value) in enumerate(depth):
        attended = torch.addcmul(attended, p[..., s + j, None], _repeat(value, groups))
    return attended.to(q_bhte.dtype)


def probabilities(
    q_bhte: Tensor, k_bkse: Tensor, depth_keys: Sequence[Tensor], mask_b1ts: Tensor | None = None
) -> Tensor:
    """Return the softmax over sequence and depth, p_bhtx, where x is the s tokens and then the n depth entries."""
    t, s, groups = q_bhte.shape[2], k_bkse.shape[2], q_bhte.shape[1] // k_bkse.shape[1]
    q = upcast(q_bhte) * q_bhte.shape[3] ** -0.5
    seen = torch.ones(t, s, dtype=torch.bool, device=q_bhte.device).tril(s - t) if mask_b1ts is None else mask_b1ts
    scores = (q @ _repeat(k_bkse, groups).mT).masked_fill(~seen, -torch.inf)
    depth_scores = [(q * _repeat(key, groups)).sum(-1, keepdim=True) for key in depth_keys]
    return torch.cat([scores, *depth_scores], dim=-1).softmax(-1)


def _repeat(x_bkse: Tensor, groups: int) -> Tensor:
    """Return x_bhse in fp32 or better: repeat each key/value head for all of its query heads."""
    return upcast(x_bkse).repeat_interleave(groups, 1)
