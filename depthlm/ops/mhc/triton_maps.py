# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Triton functions that compute the maps of `mhc_post_pre` and their gradients in registers.

The columns of the projection are in two parts: H_res as [NP, NP], padded to a power of two, and 16 columns with H_pre
from column 0 and H_post from column NP. So every product has the 16 columns that `tl.dot` requires.

Shapes: p positions (batch and tokens), i new stream, j old stream, c columns, k iterations.
"""

from depthlm.ops.triton_common import tl, triton


@triton.jit
def columns(N: tl.constexpr, NP: tl.constexpr):
    """Return the index among the m and the mask of the columns of H_res, then those of H_pre and H_post."""
    i, j = tl.arange(0, NP * NP) // NP, tl.arange(0, NP * NP) % NP
    half, stream = tl.arange(0, 16) // NP, tl.arange(0, 16) % NP
    return 2 * N + i * N + j, (i < N) & (j < N), half * N + stream, (half < 2) & (stream < N)


@triton.jit
def load(ptr, at_p, inside_p, at_c, held_c):
    """Load [p, c] of a matrix in fp32. at_p: offsets of the rows. at_c: offsets of the columns."""
    return tl.load(ptr + at_p[:, None] + at_c[None, :], inside_p[:, None] & held_c[None, :], other=0.0).to(tl.float32)


@triton.jit
def logits_and_gates(projected_r, projected_g, alpha_ptr, bias_ptr, N: tl.constexpr, NP: tl.constexpr):
    """Return the logits of H_res, and the sigmoid of the logits of H_pre and H_post."""
    at_r, held_r, at_g, held_g = columns(N, NP)
    bias_r = tl.load(bias_ptr + at_r, held_r, other=0.0).to(tl.float32)
    bias_g = tl.load(bias_ptr + at_g, held_g, other=0.0).to(tl.float32)
    alpha_g = tl.load(alpha_ptr + at_g // N, held_g, other=0.0).to(tl.float32)
    logits_g = alpha_g[None, :] * projected_g + bias_g[None, :]
    return tl.load(alpha_ptr + 2).to(tl.float32) * projected_r + bias_r[None, :], tl.sigmoid(logits_g)


@triton.jit
def cells(N: tl.constexpr, NP: tl.constexpr):
    """Return the mask of the cells [i, j] that are not padding, and their index among n * n."""
    i, j = tl.arange(0, NP)[None, :, None], tl.arange(0, NP)[None, None, :]
    return (i < N) & (j < N), i * N + j


@triton.jit
def exponentials(logits_pij, valid_ij):
    """Return the start of the Sinkhorn iterations, 0 in the padding. Factors and floor equal those of the reference."""
    top = tl.max(tl.where(valid_ij, logits_pij, -1e30), axis=1)
    below_top = tl.where(valid_ij, logits_pij - top[:, None, :], 0.0)
    return tl.where(valid_ij, tl.maximum(tl.exp(below_top), 1e-30), 0.0)


@triton.jit
def totals(m_pij, DIM: tl.constexpr):
    """Return the sums over a dimension, and 1 in the padding."""
    total = tl.sum(m_pij, axis=DIM)
    # the padding sums to 0
    return tl.where(total > 0, total, 1.0)


@triton.jit
def sinkhorn(logits_pij, valid_ij, iterations):
    """Scale exp(logits) so that rows and columns sum to 1."""
    m = exponentials(logits_pij, valid_ij)
    for _ in range(iterations):
        m = m / totals(m, 1)[:, None, :]
        m = m / totals(m, 2)[:, :, None]
    return m


@triton.jit
def sinkhorn_backward(logits_pij, grad_ptr, sums_ptr, p, inside, iterations, N: tl.constexpr, NP: tl.constexpr):
    """Return the gradient of the logits.

    The iterations run again and store their sums, a few numbers each, at sums_ptr. The backward pass recovers each
    iterate as the next iterate times its sums.
    """
    valid, at_ij = cells(N, NP)
    at = sums_ptr + (p * iterations * (2 * NP))[:, None] + tl.arange(0, NP)[None, :]
    m = exponentials(logits_pij, valid)
    for k in range(iterations):
        total = totals(m, 1)
        tl.store(at + 2 * k * NP, total, inside[:, None])
        m = m / total[:, None, :]
        total = totals(m, 2)
        tl.store(at + (2 * k + 1) * NP, total, inside[:, None])
        m = m / total[:, :, None]
    # the values that follow were written by other threads
    tl.debug_barrier()
    grad = tl.load(grad_ptr + (p * N * N)[:, None, None] + at_ij, inside[:, None, None] & valid, other=0.0)
    grad = grad.to(tl.float32)
    for step in range(iterations):
        k = iterations - 1 - step
        total = tl.load(at + (2 * k + 1) * NP, inside[:, None], other=1.0)[:, :, None]
        # m = before / s: d before = (d m - sum(d m * m)) / s
        grad = tl.where(valid, (grad - tl.sum(grad * m, axis=2)[:, :, None]) / total, 0.0)
        m = m * total
        total = tl.load(at + 2 * k * NP, inside[:, None], other=1.0)[:, None, :]
        grad = tl.where(valid, (grad - tl.sum(grad * m, axis=1)[:, None, :]) / total, 0.0)
        m = m * total
    return grad * m
