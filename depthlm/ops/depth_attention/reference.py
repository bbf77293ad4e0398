"""The value mix of Depth-Attention (arXiv 2606.05014, section 3.2), at every position and key/value head:

    qbar = mean of the head's queries;    alpha = softmax_j(qbar . k_j / sqrt(e));    vmix = sum_j alpha_j v_j

Shapes: b batch, t tokens, h query heads, k key/value heads, e head size, n sources and the layer itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import expect, fused
from depthlm.ops.depth_reduce import source_scores, weighted_sum

# limits of the Triton kernels: a program loads complete heads, and its code is unrolled over all sources
MAX_SOURCES, WIDEST = 64, 256


def depth_value_mix(q_bhte: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return vmix_bkte, in the widest dtype of the values.

    keys, values: n tensors k_bkte and v_bkte each.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    e, unsupported = q_bhte.shape[3], None
    if len(keys) > MAX_SOURCES:
        unsupported = f"{len(keys)} sources, self included, are more than {MAX_SOURCES}"
    elif e > WIDEST:
        unsupported = f"head size {e} is above {WIDEST}"
    elif e != values[0].shape[3]:
        unsupported = f"values of {values[0].shape[3]} are not as wide as keys of {e}"
    if not fused("depth_attention", [q_bhte, *keys, *values], unsupported):
        return weighted_sum(depth_weights(q_bhte, keys), values)
    from depthlm.ops.depth_attention.triton import forward

    check_entries("depth_attention", q_bhte, keys, values)
    return forward(q_bhte, list(keys), list(values))[0]


def depth_weights(q_bhte: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Return alpha_nbkt in fp32 or better."""
    exact = torch.promote_types(q_bhte.dtype, torch.float32)
    qbar_bkte = q_bhte.unflatten(1, (keys[0].shape[1], -1)).mean(2, dtype=exact)
    return source_scores(qbar_bkte * q_bhte.shape[3] ** -0.5, keys, eps=None).softmax(0)


def check_entries(operator: str, q_bhte: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Check the shapes, devices and dtypes of k_bkte and v_bkte for a Triton kernel.

    Raises: ValueError if they do not fit the queries or each other, and what `backend.expect` raises.
    """
    (b, h, t, e), num_kv_heads = q_bhte.shape, keys[0].shape[1]
    if len(keys) != len(values):
        raise ValueError(f"{operator}: {len(keys)} keys and {len(values)} values, must be equally many")
    if h % num_kv_heads:
        raise ValueError(f"{operator}: {h} query heads, must be a multiple of the {num_kv_heads} key/value heads")
    entries = {f"{name}s[{j}]": x for name, xs in (("key", keys), ("value", values)) for j, x in enumerate(xs)}
    expect(operator, q_bhte, **{name: (x, (b, num_kv_heads, t, e)) for name, x in entries.items()})
