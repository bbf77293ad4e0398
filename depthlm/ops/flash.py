"""Flash attention on a GPU over sequences that contain several documents.

Documents that follow one another in memory are the sequences of different lengths that flash attention takes (arXiv
2307.08691), so no mask of t x t values exists, and no scores between documents are computed.

Shapes: b batch, t tokens, h query heads, k key/value heads, e head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from depthlm.ops.autograd import call
from depthlm.ops.backend import gpu_capability

aten: Any = torch.ops.aten


class Bounds(NamedTuple):
    """Where documents begin in the b * t tokens of a batch.

    offsets: the index of the first token of each document, and then b * t; int32. longest: at least the number of
    tokens of the longest document.
    """

    offsets: Tensor
    longest: int


def gpu_flash(q_bhte: Tensor) -> bool:
    """Return whether flash attention on a GPU supports these queries."""
    narrow, width = q_bhte.is_cuda and q_bhte.itemsize == 2 and q_bhte.is_floating_point(), q_bhte.shape[3]
    if not narrow or gpu_capability() < (8, 0) or width % 8 or width > 256:
        return False
    # the backward pass does not fit into the shared memory of consumer GPUs
    return not (192 < width <= 224 and gpu_capability() not in ((8, 0), (9, 0), (10, 0)))


def by_cudnn(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, causal: bool) -> bool:
    """Return whether PyTorch computes this attention on a GPU with cuDNN, which on Hopper is 1.5 times as fast."""
    # for each number of cached tokens, cuDNN would make another plan
    if not torch.cuda.is_available() or q_bhte.shape[2] != k_bkte.shape[2]:
        return False
    grouped = q_bhte.shape[1] != k_bkte.shape[1]
    # within an autograd function, PyTorch would not ask for a backward pass
    with torch.enable_grad():
        choice = torch._fused_sdp_choice(q_bhte, k_bkte, v_bkte, None, 0.0, causal, scale=None, enable_gqa=grouped)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def takes_documents(q_bhte: Tensor) -> bool:
    """Return whether flash attention supports these queries with the bounds of documents."""
    # ROCm returns the log-sum-exp in another layout (github.com/pytorch/pytorch/pull/187899)
    return gpu_flash(q_bhte) and torch.version.hip is None


def attend_by_document(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, bounds: Bounds) -> Tensor:
    """Return attended_bhte: each token attends to itself and to all tokens before it in its document."""
    return call(_ByDocument, q_bhte, k_bkte, v_bkte, bounds)


class _ByDocument(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, bounds: Bounds) -> Tensor:
        out_bhte, lse_bht, *ctx.rest = forward(q_bhte, k_bkte, v_bkte, bounds)
        ctx.save_for_backward(q_bhte, k_bkte, v_bkte, out_bhte, lse_bht)
        ctx.bounds = bounds
        return out_bhte

    @staticmethod
    def backward(ctx: Any, grad_bhte: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse_bht = ctx.saved_tensors
        return *backward(grad_bhte, saved, lse_bht, ctx.bounds, ctx.rest), None


def forward(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, bounds: Bounds) -> tuple[Tensor, ...]:
    """Return out_bhte and the log-sum-exp lse_bht in fp32, and then what `backward` takes as `rest`."""
    (b, h, t, _), tokens = q_bhte.shape, [_by_token(x) for x in (q_bhte, k_bkte, v_bkte)]
    lengths = bounds.offsets, bounds.offsets, bounds.longest, bounds.longest
    out, lse, *rest, _ = aten._flash_attention_forward(*tokens, *lengths, 0.0, True, False)
    # without dropout, the random state has no content, and may be missing
    rest = [out.new_empty(0) if x is None else x for x in rest]
    return out.unflatten(0, (b, t)).transpose(1, 2), lse.view(h, b, t).transpose(0, 1).contiguous(), *rest


def backward(
    grad_bhte: Tensor, saved: Sequence[Tensor], lse_bht: Tensor, bounds: Bounds, rest: list[Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v. saved: q_bhte, k_bkte, v_bkte and out_bhte."""
    b, t = grad_bhte.shape[0], grad_bhte.shape[2]
    grad, q, k, v, out = (_by_token(x) for x in (grad_bhte, *saved))
    lengths = bounds.offsets, bounds.offsets, bounds.longest, bounds.longest
    lse = lse_bht.transpose(0, 1).flatten(1).contiguous()
    grads = aten._flash_attention_backward(grad, q, k, v, out, lse, *lengths, 0.0, True, *rest)
    return tuple(x.unflatten(0, (b, t)).transpose(1, 2) for x in grads)


def _by_token(x_bhte: Tensor) -> Tensor:
    """Return x_(bt)he, whose rows of e values are contiguous."""
    return x_bhte.transpose(1, 2).flatten(0, 1).contiguous()
