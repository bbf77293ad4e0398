"""Operators on tensors of more than 2^31 numbers, of which only the first and the last programs run.

Memory is sparse: files without content, and allocations that nobody touches. The results of the last rows are compared
with those of the reference on these rows alone. An offset that overflows is out of bounds, or gives wrong numbers.
"""

import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from .cases import normal

ROWS, BF16 = 40, torch.bfloat16


def sparse(shape: tuple[int, ...], dim: int, seed: int, factor: float = 1.0) -> Tensor:
    """Return zeros in bf16, but for random numbers in the last ROWS of a dimension."""
    size = int(np.prod(shape)) * 2
    with tempfile.TemporaryFile() as file:
        x = torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=size)).view(BF16).view(shape)
    part = x.narrow(dim, shape[dim] - ROWS, ROWS)
    part.copy_(factor * normal(*part.shape, seed=seed))
    return x


def end(x: Tensor, dim: int, rows: int = ROWS) -> Tensor:
    return x.narrow(dim, x.shape[dim] - rows, rows)


def all_huge() -> Iterator[tuple[str, Callable[[], tuple[list[Tensor], list[Tensor]]]]]:
    """Yield names, and functions that return what Triton found in the last rows, and the same in float64."""
    for function in (cross_entropy, depth_attention, moda):
        yield function.__name__, function
    for kind in ("hyper", "mhc"):
        yield f"streams {kind}", lambda kind=kind: streams(kind)
    for kind in ("attend", "one", "weighted", "gated"):
        yield f"reads {kind}", lambda kind=kind: reads(kind)


def cross_entropy():
    from depthlm.ops.cross_entropy import triton as operators

    v, kept = 50305, 2
    r = 2**31 // v + 60
    logits, targets = sparse((r, v), 0, 1), torch.arange(r) * 7 % v
    nll, lse, ones = torch.empty(r), torch.empty(r), torch.ones(r)
    exact = end(logits, 0, kept).double().requires_grad_()
    operators.losses(logits, targets, nll, lse)
    operators.differentiate(logits, [targets, lse, ones, ones], logits)
    of_lse = exact.logsumexp(1)
    of_nll = of_lse - exact.gather(1, targets[-kept:, None])[:, 0]
    (grad,) = torch.autograd.grad(of_lse.sum() + of_nll.sum(), exact)
    return [end(x, 0, kept) for x in (nll, lse, logits)], [of_nll.detach(), of_lse.detach(), grad]


def depth_attention():
    from depthlm.ops.backend import using
    from depthlm.ops.depth_attention.naive import depth_value_mix
    from depthlm.ops.depth_attention.triton import forward

    t, heads, e, kept = 2**31 // (8 * 64) + 61, 8, 64, 4
    q, *entries = (sparse((1, t, heads, e), 1, seed).transpose(1, 2) for seed in range(5))
    found = end(forward(q, entries[:2], entries[2:])[0], 2, kept)
    with using("torch"):
        parts = [end(x, 2, kept).double() for x in (q, *entries)]
        return [found], [depth_value_mix(parts[0], parts[1:3], parts[3:])]


def moda():
    from depthlm.ops.moda import triton as operators
    from depthlm.ops.moda.merge import moda_depth, moda_depth_backward

    t, kv_heads, groups, e, n, kept = 2**31 // (8 * 6 * 64) + 61, 8, 6, 64, 4, 1
    q, out, grad, grad_q = (sparse((1, t, kv_heads * groups, e), 1, seed).transpose(1, 2) for seed in range(4))
    entries, sums = (sparse((n, 2, 1, t, kv_heads, e), 3, seed) for seed in (4, 5))
    lse = torch.zeros(1, kv_heads * groups, t)
    before = end(sums, 3, kept).double()
    context, merged = operators.forward(q, out, lse, entries)
    total = operators.backward(grad, q, context, merged, grad_q, entries, sums, 1)
    parts = [end(x, 2, kept).double() for x in (q, out, grad, grad_q, lse)]
    of_entries = end(entries, 3, kept).double().contiguous()
    exact = moda_depth(parts[0], parts[1], parts[4], of_entries)
    of_q = moda_depth_backward(parts[2], parts[0], *exact, parts[3], of_entries, before, 1)
    found = [*(end(x, 2, kept) for x in (context, merged, total)), end(sums, 3, kept)]
    return found, [*exact, of_q, before]


def streams(kind: str):
    from depthlm.ops.backend import using
    from depthlm.ops.hyper_connections import triton as hyper
    from depthlm.ops.hyper_connections.naive import hyper_post_pre
    from depthlm.ops.mhc import triton as mhc
    from depthlm.ops.mhc.cpu import PAPER, Parameters, Pending
    from depthlm.ops.mhc.naive import mhc_post_pre

    n, d, kept = 4, 64, 17
    t, m = 2**31 // (n * d) + 61, n * (n + 2)
    sources = [sparse(s, 1, k) for k, s in enumerate(((1, t, n, d), (1, t, d), (1, t, n), (1, t, n, n)))]
    x, *written = (end(y, 1, kept).double() for y in sources)
    shapes = ((n + 2, d), (2,), (n,), (n,), (n, n)) if kind == "hyper" else ((m, n * d), (n * d,), (3,), (m,))
    first, second, *others = parameters = [normal(*s, seed=9).to(BF16) for s in shapes]
    if kind == "hyper":
        found = hyper.forward(sources, [first, *others, second], 1e-5, BF16)
    else:
        first *= 0.1
        found = mhc.forward(sources, [first, second, *reversed(others)], 1e-5, 3, [*PAPER], BF16)
    first, second, *others = (p.double() for p in parameters)
    with using("torch"):
        if kind == "hyper":
            exact = hyper_post_pre(x, Pending(*written), tuple(others), (first, second), 1e-5)
        else:
            exact = mhc_post_pre(x, Pending(*written), Parameters(first, second, *others), 1e-5, 3)
    return [end(y, 1, kept) for y in found[:4]], list(exact)


def reads(kind: str):
    from depthlm.ops.attention_residuals.naive import depth_attend
    from depthlm.ops.attention_residuals.triton import depth_attend as depth_attend_triton
    from depthlm.ops.backend import using
    from depthlm.ops.dca.naive import gated_reads
    from depthlm.ops.dca.triton import gated
    from depthlm.ops.denseformer.naive import weighted_reads
    from depthlm.ops.denseformer.triton import weighted

    d, n, kept, count = 128, 2, 17, 1 if kind == "one" else 2
    p = 2**31 // d + 61
    xs = [sparse((p, d), 0, seed) for seed in range(n)]
    parts = [end(x, 0, kept).double() for x in xs]
    shapes = (count, d), (count, n), (count, n, d), (count, n, d)
    query, weights, bias, gate = (normal(*s, seed=5).to(BF16) for s in shapes)
    gate /= d**0.5
    with using("torch"):
        if kind in ("attend", "one"):
            found = depth_attend_triton(query, xs, 1e-5)
            exact = depth_attend(query.double(), parts, 1e-5)
        elif kind == "weighted":
            found = [weighted(weights, xs)]
            exact = [weighted_reads(weights.double(), parts)]
        else:
            found = [gated(bias, gate, xs)]
            exact = [gated_reads(bias.double(), gate.double(), parts)]
    return [end(y, 1, kept) for y in found], list(exact)
