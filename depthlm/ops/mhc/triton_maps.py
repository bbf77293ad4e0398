# mypy: allow-untyped-defs
"""The maps of mHC from the projection of the streams, and their derivatives, in Triton.

parameters: the bias and alpha. kept: the projection, and 1 / rms of the streams.

Shapes: p positions, n streams, i new stream, j old stream, m columns of the projection.
"""

from depthlm.ops.mhc.triton_streams import rounded
from depthlm.ops.triton_common import load_fp32, tl, triton


@triton.jit
def load_gates(part: tl.constexpr, parameters, kept, p, mask_p, settings):
    """Return the projection and the sigmoid of the logits of H_pre (part 0) or H_post (part 1), [p, n]."""
    n: tl.constexpr = settings.n
    m: tl.constexpr = settings.m
    column = part * n + tl.arange(0, settings.padded_n)
    valid, scale = column < (part + 1) * n, tl.load(kept[1] + p, mask_p, other=0.0)
    projected = (
        load_fp32(kept[0] + (p * m)[:, None], column[None, :], mask_p[:, None] & valid[None, :]) * scale[:, None]
    )
    alpha, bias = tl.load(parameters[1] + part).to(tl.float32), load_fp32(parameters[0], column, valid)
    return projected, tl.sigmoid(alpha * projected + bias[None, :])


@triton.jit
def load_res(parameters, kept, p, mask_p, settings):
    """Return the projection and the logits of H_res, [p, i, j]."""
    n: tl.constexpr = settings.n
    valid, at_ij = cells(settings)
    at, scale = (p * settings.m + 2 * n)[:, None, None] + at_ij, tl.load(kept[1] + p, mask_p, other=0.0)
    projected = load_fp32(kept[0], at, mask_p[:, None, None] & valid) * scale[:, None, None]
    alpha, bias = tl.load(parameters[1] + 2).to(tl.float32), load_fp32(parameters[0] + 2 * n, at_ij, valid)
    return projected, alpha * projected + bias


@triton.jit
def cells(settings):
    """Return the mask of the cells [i, j] that are not padding, and their index among n * n."""
    i, j = tl.arange(0, settings.padded_n)[None, :, None], tl.arange(0, settings.padded_n)[None, None, :]
    return (i < settings.n) & (j < settings.n), i * settings.n + j


@triton.jit
def sinkhorn(logits_pij, sums_ptr, mask_p, iterations, settings):
    """Scale exp(logits) so that rows and columns sum to 1. Store the sums of all iterations unless sums_ptr is None."""
    valid, _ = cells(settings)
    top = tl.max(tl.where(valid, logits_pij, -1e30), axis=1)
    below_top = tl.where(valid, logits_pij - top[:, None, :], 0.0)
    # factors and floor equal those in PyTorch
    m = tl.where(valid, tl.maximum(tl.exp(below_top), 1e-30), 0.0)
    for k in range(iterations):
        for axis in tl.static_range(1, 3):
            sums = tl.sum(m, axis=axis)
            # the padding sums to 0
            sums = tl.where(sums > 0, sums, 1.0)
            if settings.res_eps > 0:
                sums = tl.where((k > 0) | (axis > 1), sums + settings.res_eps, sums)
            if sums_ptr is not None:
                tl.store(sums_ptr + (2 * k + axis - 1) * settings.padded_n, sums, mask_p[:, None])
            m = m / tl.expand_dims(sums, axis)
            if settings.res_eps > 0:
                m = tl.where(valid & (k == 0) & (axis == 1), m + settings.res_eps, m)
    return m


@triton.jit
def sinkhorn_backward(logits_pij, grad_ptr, sums_ptr, p, mask_p, iterations, settings):
    """Return the gradient of the logits.

    The iterations run again and store their sums, a few numbers each, at sums_ptr. The backward pass recovers each
    iterate as the next iterate times its sums.
    """
    start = (p * iterations * (2 * settings.padded_n))[:, None]
    sums_ptr += start + tl.arange(0, settings.padded_n)[None, :]
    m = sinkhorn(logits_pij, sums_ptr, mask_p, iterations, settings)
    # the values that follow were written by other threads
    tl.debug_barrier()
    valid, at_ij = cells(settings)
    grad = load_fp32(grad_ptr, (p * settings.n * settings.n)[:, None, None] + at_ij, mask_p[:, None, None] & valid)
    for back in range(iterations):
        for axis in tl.static_range(2, 0, -1):
            at = sums_ptr + (2 * (iterations - 1 - back) + axis - 1) * settings.padded_n
            sums = tl.expand_dims(tl.load(at, mask_p[:, None], other=1.0), axis)
            if settings.res_eps > 0:
                m = tl.where(valid & (back == iterations - 1) & (axis == 1), m - settings.res_eps, m)
            # m = before / s: d before = (d m - sum(d m * m)) / s
            grad = tl.where(valid, (grad - tl.expand_dims(tl.sum(grad * m, axis=axis), axis)) / sums, 0.0)
            m = m * sums
    return rounded(grad * m)
