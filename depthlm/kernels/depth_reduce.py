"""Reductions over the sources of a read: scores of each source, and their weighted sums.

Shapes: n sources, b batch, t tokens, d hidden size. Sources are a sequence of n tensors x_btd, which may differ in type
(a decoder under autocast has an fp32 embedding and 16-bit outputs); a sum has the widest of their types.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from depthlm.model.functions import upcast


def weighted_sum(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """sum_j weights[j] * sources[j] as y_btd.

    weights: [n], or [n, d] for each dimension, or [n, b, t] for each token.
    """
    return WeightedSum.apply(weights, *sources)


def gated_sum(bias_nd: Tensor, score_nbt: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """sum_j relu(bias[j] + score[j]) * sources[j] as y_btd, the gate of each token and dimension."""
    return GatedSum.apply(bias_nd, score_nbt, *sources)


def source_scores(query: Tensor, sources: Sequence[Tensor], eps: float | None) -> Tensor:
    """score_nbt in fp32 or better: query . sources[j], or query . sources[j] / rms(sources[j]) with an eps.

    query: [d], or [n, d] for each source, or [b, t, d] for each token.
    """
    return SourceScores.apply(query, eps, *sources)


class WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        return _sum_of_products(_broadcast(weights), sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *sources = ctx.saved_tensors
        needs_weights, *needs = ctx.needs_input_grad
        grad_weights = None
        if needs_weights:
            # [n] sums over b, t, d; [n, d] over b, t; [n, b, t] over d
            dims = {1: (0, 1, 2), 2: (0, 1), 3: (2,)}[weights.ndim]
            grad_weights = torch.stack([_sum(grad, x, dims) for x in sources]).to(weights.dtype)
        pairs = zip(_broadcast(weights), sources, needs, strict=True)
        return grad_weights, *((grad * w.to(grad.dtype)).to(x.dtype) if need else None for w, x, need in pairs)


class GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias_nd: Tensor, score_nbt: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(bias_nd, score_nbt, *sources)
        gates = (_gate(bias_d, score_bt) for bias_d, score_bt in zip(bias_nd, score_nbt, strict=True))
        return _sum_of_products(gates, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        bias_nd, score_nbt, *sources = ctx.saved_tensors
        grad_bias, grad_score, grad_sources = [], [], []
        for bias_d, score_bt, x in zip(bias_nd, score_nbt, sources, strict=True):
            gate = _gate(bias_d, score_bt)
            grad_sources.append((grad * gate).to(x.dtype))
            grad_gate = (upcast(grad) * x).mul_(gate > 0)
            grad_bias.append(grad_gate.sum((0, 1)))
            grad_score.append(grad_gate.sum(2))
        return torch.stack(grad_bias).to(bias_nd.dtype), torch.stack(grad_score).to(score_nbt.dtype), *grad_sources


class SourceScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float | None, *sources: Tensor) -> Tensor:
        scale_nbt = torch.stack([_reciprocal_rms(x, eps) for x in sources])
        queries = query if query.ndim == 2 else [query] * len(sources)
        score_nbt = torch.stack([_sum(x, q, (2,)) for x, q in zip(sources, queries, strict=True)]) * scale_nbt
        ctx.save_for_backward(query, scale_nbt, score_nbt, *sources)
        ctx.normed = eps is not None
        return score_nbt

    @staticmethod
    def backward(ctx: Any, grad_nbt: Tensor) -> tuple[Tensor | None, ...]:
        query, scale_nbt, score_nbt, *sources = ctx.saved_tensors
        scaled_nbt = grad_nbt * scale_nbt
        queries = upcast(query) if query.ndim == 2 else [upcast(query)] * len(sources)
        if query.ndim == 3:
            grad_query = _sum_of_products(scaled_nbt[..., None], sources)
        else:
            grad_query = torch.stack([_sum(x, s[..., None], (0, 1)) for x, s in zip(sources, scaled_nbt, strict=True)])
            grad_query = grad_query if query.ndim == 2 else grad_query.sum(0)
        # d rms(x) is along x itself
        along_nbt = -scaled_nbt * score_nbt * scale_nbt / sources[0].shape[-1] if ctx.normed else None
        grads = []
        for j, (x, q) in enumerate(zip(sources, queries, strict=True)):
            grad = scaled_nbt[j, ..., None] * q
            if along_nbt is not None:
                grad.addcmul_(x, along_nbt[j, ..., None])
            grads.append(grad.to(x.dtype))
        return grad_query.to(query.dtype), None, *grads


def _sum_of_products(weights: Any, sources: Sequence[Tensor]) -> Tensor:
    kind = reduce(torch.promote_types, (x.dtype for x in sources))
    total = None
    for w, x in zip(weights, sources, strict=True):
        if total is None:
            total = x.to(torch.promote_types(kind, torch.float32)) * w
        else:
            total.addcmul_(x, w)
    assert total is not None
    return total.to(kind)


def _broadcast(weights: Tensor) -> Tensor:
    return weights[..., None] if weights.ndim == 3 else weights


def _sum(x: Tensor, y: Tensor, dims: tuple[int, ...]) -> Tensor:
    return (upcast(x) * y).sum(dims)


def _gate(bias_d: Tensor, score_bt: Tensor) -> Tensor:
    return (bias_d + score_bt[..., None]).relu_()


def _reciprocal_rms(x: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return torch.ones(x.shape[:-1], dtype=upcast(x[:0]).dtype, device=x.device)
    kind = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=kind).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
