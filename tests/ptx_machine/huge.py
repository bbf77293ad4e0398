"""Operators on tensors of more than 2^31 numbers, of which only the first and the last programs run.

Memory is sparse: files without content, and allocations that nobody touches. The results of the last tokens are
compared with those of the reference on these tokens alone. An offset that overflows is out of bounds, or gives wrong
numbers.
"""

import math
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from .cases import normal

TOKENS, BF16 = 40, torch.bfloat16
Outputs = list[tuple[Tensor, int]]


def sparse(shape: tuple[int, ...], dim: int, seed: int) -> Tensor:
    """Return zeros in bf16, but for random numbers of the last TOKENS, along a dimension."""
    with tempfile.TemporaryFile() as file:
        bits = np.memmap(file, np.uint8, "w+", shape=2 * math.prod(shape))
    x = torch.from_numpy(bits).view(BF16).view(shape)
    last = x.narrow(dim, shape[dim] - TOKENS, TOKENS)
    last.copy_(normal(*last.shape, seed=seed))
    return x


def compare(
    call: Callable[..., Outputs], shapes: list[tuple[tuple[int, ...], int]], *parameters: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what Triton computes for the last three tokens, and the same in float64.

    call: returns outputs, each with its dimension of tokens. shapes: of its first arguments, also with that dimension.
    """
    from depthlm.ops.backend import using

    inputs = [sparse(shape, dim, seed) for seed, (shape, dim) in enumerate(shapes)]
    parts = [x.narrow(dim, x.shape[dim] - TOKENS, TOKENS).double() for x, (_, dim) in zip(inputs, shapes, strict=True)]
    with torch.no_grad():
        with using("triton"):
            found = call(*inputs, *(p.to(BF16) for p in parameters))
        with using("torch"):
            exact = call(*parts, *(p.to(BF16).double() for p in parameters))
    return tuple([x.narrow(dim, x.shape[dim] - 3, 3) for x, dim in outputs] for outputs in (found, exact))


def all_huge() -> Iterator[tuple[str, Callable[[], tuple[list[Tensor], list[Tensor]]]]]:
    """Yield names of operators, and functions that return the results of `compare`."""
    from depthlm.ops.attention_residuals.naive import depth_attend
    from depthlm.ops.cross_entropy import chunked
    from depthlm.ops.dca.naive import gated_reads
    from depthlm.ops.denseformer.naive import weighted_reads
    from depthlm.ops.depth_attention.naive import depth_value_mix
    from depthlm.ops.hyper_connections.naive import hyper_post_pre
    from depthlm.ops.mhc.cpu import PAPER, Parameters, Pending
    from depthlm.ops.mhc.naive import mhc_post_pre
    from depthlm.ops.moda.merge import moda_depth, moda_depth_backward

    def losses(logits):
        targets = torch.arange(len(logits)).flip(0) * 7 % logits.shape[1]
        with torch.enable_grad():
            nll, lse = chunked.cross_entropy(logits.requires_grad_(), targets, logits.dtype == BF16)
            (grad,) = torch.autograd.grad(nll.sum() + lse.sum(), logits)
        return [(x.detach(), 0) for x in (nll, lse, grad)]

    yield "cross_entropy", lambda: compare(losses, [((2**31 // 50305 + 60, 50305), 0)])

    def mix(*tensors):
        q, *entries = (x.transpose(1, 2) for x in tensors)
        return [(depth_value_mix(q, entries[:2], entries[2:]), 2)]

    yield "depth_attention", lambda: compare(mix, [((1, 2**31 // 512 + 61, 8, 64), 1)] * 5)

    def depth(q, out, grad, grad_q, entries, sums, lse):
        q, out, grad, grad_q = (x.transpose(1, 2) for x in (q, out, grad, grad_q))
        attended, merged = moda_depth(q, out, lse, entries)
        total = moda_depth_backward(grad, q, attended, merged, grad_q, entries, sums, 1)
        return [(attended, 2), (merged, 2), (total, 2), (sums, 3)]

    t = 2**31 // (8 * 6 * 64) + 61
    shapes = [((1, t, 48, 64), 1)] * 4 + [((4, 2, 1, t, 8, 64), 3)] * 2 + [((1, 48, t), 2)]
    yield "moda", lambda: compare(depth, shapes)

    n, d = 4, 64
    t = 2**31 // (n * d) + 61
    streams = [((1, t, n, d), 1), ((1, t, d), 1), ((1, t, n), 1), ((1, t, n, n), 1)]

    def hyper(x, output, post, res, *given):
        found = hyper_post_pre(x, Pending(output, post, res), given[:3], given[3:], 1e-5)
        return [(y, 1) for y in found]

    of_hyper = [normal(*s, seed=9) for s in ((n,), (n,), (n, n), (n + 2, d), (2,))]
    yield "streams hyper", lambda: compare(hyper, streams, *of_hyper)

    def mhc(x, output, post, res, *given):
        found = mhc_post_pre(x, Pending(output, post, res), Parameters(*given), 1e-5, 3, form=PAPER)
        return [(y, 1) for y in found]

    m = n * (n + 2)
    of_mhc = [normal(m, n * d) / 10, *(normal(*s, seed=9) for s in ((n * d,), (3,), (m,)))]
    yield "streams mhc", lambda: compare(mhc, streams, *of_mhc)

    sources = [((2**31 // 128 + 61, 128), 0)] * 2
    for reads in (1, 2):
        query = normal(reads, 128, seed=5)
        attend = lambda x, y, query: [(out, 1) for out in depth_attend(query, [x, y], 1e-5)]  # noqa: E731
        yield f"reads attend {reads}", lambda attend=attend, query=query: compare(attend, sources, query)
    weights, bias, gate = normal(2, 2), normal(2, 2, 128), normal(2, 2, 128, seed=6) / 12
    weighted = lambda x, y, weights: [(weighted_reads(weights, [x, y]), 1)]  # noqa: E731
    yield "reads weighted", lambda: compare(weighted, sources, weights)
    gated = lambda x, y, bias, gate: [(gated_reads(bias, gate, [x, y]), 1)]  # noqa: E731
    yield "reads gated", lambda: compare(gated, sources, bias, gate)
