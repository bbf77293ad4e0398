"""The value mix of Depth-Attention (arXiv 2606.05014, section 3.2), at every position and key/value head:

    qbar = mean of the head's queries;    alpha = softmax_j(qbar . k_j / sqrt(e));    vmix = sum_j alpha_j v_j

This is the definition. Training runs cpu.py or triton.py beside it, and this code only with kernels=naive.

Shapes: b batch, t tokens, h query heads, k key/value heads, e head size, n sources and the layer itself.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import operator
from depthlm.ops.depth_attention.cpu import depth_value_mix as cpu
from depthlm.ops.dtypes import upcast

# limits of the Triton kernels: a program loads complete heads, and its code is unrolled over all sources
MAX_SOURCES, MAX_HEAD_SIZE = 64, 256


def _triton() -> Callable[..., Tensor]:
    from depthlm.ops.depth_attention.triton import depth_value_mix

    return depth_value_mix


def _unsupported(q_bhte: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> str | None:
    e = q_bhte.shape[3]
    if len(keys) > MAX_SOURCES:
        return f"{len(keys)} sources, self included, are more than {MAX_SOURCES}"
    if e > MAX_HEAD_SIZE:
        return f"head size {e} is above {MAX_HEAD_SIZE}"
    return None if e == values[0].shape[3] else f"values of {values[0].shape[3]} are not as wide as keys of {e}"


@operator("depth_attention", triton=_triton, cpu=cpu, unsupported=_unsupported)
def depth_value_mix(q_bhte: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return vmix_bkte, in the widest dtype of the values.

    keys, values: n tensors k_bkte and v_bkte each.
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    return (depth_weights(q_bhte, keys)[..., None] * torch.stack(list(values))).sum(0)


def depth_weights(q_bhte: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Return alpha_nbkt in fp32 or better."""
    qbar_bkte = upcast(q_bhte).unflatten(1, (keys[0].shape[1], -1)).mean(2)
    return ((qbar_bkte * upcast(torch.stack(list(keys)))).sum(-1) / q_bhte.shape[3] ** 0.5).softmax(0)
