# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`mhc_post_pre` in Triton. The first pass writes and projects the new streams, the second one reads them.

The columns of the projection are in two parts: H_res as a matrix padded to a power of two, and 16 columns with H_pre
from column 0 and H_post from column `padded`. So every product has the 16 columns that `tl.dot` requires. If H_res is
the identity, the first part is missing.

Shapes: b batch, t tokens, p positions (batch and tokens), n streams, i new stream, j old stream, d hidden size,
m = n (n + 2) or 2 n, r columns of H_res, g columns of H_pre and H_post (gates), k iterations.
"""

import torch
from torch import Tensor

from depthlm.ops.autograd import present
from depthlm.ops.dtypes import compute_dtype, no_autocast
from depthlm.ops.library import register
from depthlm.ops.mhc.cpu import PAPER, Form, Parameters, Pending, Result
from depthlm.ops.mhc.triton_streams import (
    FORWARD_WARPS,
    POSITIONS,
    Tensors,
    check_streams,
    empty_outputs,
    launch,
    load_maps,
    load_tiles,
    mixed_tile,
    pre_gradient,
    read_streams,
    rows,
    settings_of,
    store_grad_maps,
    tile,
    write_and_read,
    write_backward,
    zeros,
)
from depthlm.ops.triton_common import cdiv, load_fp32, store_as, tl, triton

# columns per chunk of 3 or 4 streams
COLUMNS = 32


def mhc_post_pre(
    x_btnd: Tensor,
    pending: Pending | None,
    parameters: Parameters,
    eps: float,
    iterations: int,
    rebuild: bool = False,
    form: Form = PAPER,
) -> Result:
    """Run `depthlm.ops.mhc.naive.mhc_post_pre` in Triton."""
    n, d = x_btnd.shape[2:]
    phi_mw, norm_w, alpha, bias_m = parameters
    identity = len(alpha) == 2
    m, w = n * (2 if identity else n + 2), n * d
    shapes = {"phi": (phi_mw, (m, w)), "alpha": (alpha, (2 if identity else 3,)), "bias": (bias_m, (m,))}
    if norm_w is not None:
        shapes["norm"] = norm_w, (w,)
    check_streams("mhc", x_btnd, pending, **shapes)
    settings = eps, iterations, list(form), compute_dtype(x_btnd)
    weights = [phi_mw, *present(norm_w), bias_m, alpha]
    return write_and_read((forward, backward), x_btnd, pending, weights, settings, rebuild, identity)


def _outputs(sources, parameters, eps, iterations, form, dtype):
    (b, t, _, _), phi = sources[0].shape, parameters[0]
    outputs = empty_outputs(sources, [b, t, len(phi)], [b, t], identity=len(parameters[-1]) == 2)
    return [*outputs, phi.new_empty(phi.shape, dtype=dtype)]


def _gradients(grads, sources, new, parameters, kept, eps, iterations, form, dtype):
    *separate, bias, alpha = parameters
    return [*map(torch.empty_like, [*sources, *separate]), kept[1].new_empty(len(bias) + len(alpha))]


@register(__name__, "mhc_post_pre", _outputs)
def forward(
    sources: Tensors, parameters: Tensors, eps: float, iterations: int, form: list[float], dtype: torch.dtype
) -> Tensors:
    """Return input_btd, X'_btnd, post_btn, res_btij, projected_btm, 1 / rms_bt, and phi times the norm in a dtype.

    parameters: phi, the weight of the norm if it has one, bias and alpha. res_btij is left out if H_res is the
    identity.
    """
    phi, *norm, bias, alpha = parameters
    *outputs, low = _outputs(sources, parameters, eps, iterations, form, dtype)
    if norm:
        torch.mul(norm[0], phi, out=low)
    else:
        low.copy_(phi)
    settings = settings_of(sources[0], COLUMNS, eps, dtype, len(alpha) == 2, form)
    launch(mhc_forward, sources, [low, bias, alpha], outputs, iterations, settings, warps=FORWARD_WARPS)
    return [*outputs, low]


@register(__name__, "mhc_post_pre_backward", _gradients)
def backward(
    grads: Tensors, sources: Tensors, new: Tensor, parameters: Tensors, kept: Tensors,
    eps: float, iterations: int, form: list[float], dtype: torch.dtype,
) -> Tensors:  # fmt: skip
    """Return the gradients of the sources, phi and the norm, and those of bias and alpha in one tensor."""
    phi, *norm, bias, alpha = parameters
    identity = len(alpha) == 2
    projected, scale, low = kept
    b, t, n, d = new.shape
    settings = settings_of(new, COLUMNS, eps, dtype, identity, form)
    grad_sources = [torch.empty_like(x) for x in sources]
    grad_projected = torch.empty_like(projected, dtype=new.dtype)
    partial_sums = scale.new_empty(cdiv(b * t, POSITIONS), len(bias) + len(alpha))
    sums = [] if identity else [scale.new_empty(b * t, iterations, 2, settings.padded.value)]
    scratch = [grad_projected, partial_sums, *sums]
    tensors = new, [low, bias, alpha], [projected, scale], grads, grad_sources, scratch
    launch(mhc_backward, sources, *tensors, iterations, settings)
    with no_autocast(new):
        # in the dtype of the streams: a copy of them in 16 bits would move more bytes than the product
        grad_phi = (grad_projected.view(b * t, -1).mT @ new.view(b * t, n * d)).to(phi.dtype)
    grads_of_product = [grad_phi * norm[0], (grad_phi * phi).sum(0)] if norm else [grad_phi]
    return [*grad_sources, *grads_of_product, partial_sums.sum(0)]


@triton.jit
def mhc_forward(sources, parameters, outputs, iterations, positions, d, settings):
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    phi_ptr, bias_ptr, alpha_ptr = parameters
    read_ptr, new_ptr, post_ptr = outputs[0], outputs[1], outputs[2]
    projected_ptr, scale_ptr = outputs[3 if settings.identity else 4], outputs[4 if settings.identity else 5]
    p, mask_p = rows(positions, settings)
    r, mask_r, g, mask_g = _columns(settings)
    if PENDING:
        maps = load_maps(sources, p, mask_p, settings)
    projected_r = tl.zeros([settings.positions, r.shape[0]], tl.float32)
    projected_g = tl.zeros([settings.positions, 16], tl.float32)
    squares = tl.zeros(p.shape, tl.float32)
    for start in range(0, d, settings.columns):
        column, mask_c, at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        if PENDING:
            y = load_fp32(sources[1], at_y, mask)
            old = load_tiles(sources[0], at_x, mask, d, settings)
        for i in tl.static_range(n):
            if PENDING:
                new = mixed_tile(i, old, y, maps, settings).to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + at_x + i * d, new, mask)
            else:
                new = tl.load(sources[0] + at_x + i * d, mask, other=0.0)
            squares += tl.sum(new.to(tl.float32) * new.to(tl.float32), axis=1)
            phi = phi_ptr + i * d + column[:, None]
            if not settings.identity:
                phi_r = tl.load(phi + (r * (d * n))[None, :], mask_c[:, None] & mask_r[None, :], other=0.0)
                projected_r = tl.dot(new.to(settings.dtype), phi_r, projected_r, input_precision="ieee")
            phi_g = tl.load(phi + (g * (d * n))[None, :], mask_c[:, None] & mask_g[None, :], other=0.0)
            projected_g = tl.dot(new.to(settings.dtype), phi_g, projected_g, input_precision="ieee")
    scale = tl.rsqrt(squares / (d * n) + settings.eps)
    tl.store(scale_ptr + p, scale, mask_p)
    projected_r, projected_g = projected_r * scale[:, None], projected_g * scale[:, None]
    _store_columns(projected_ptr, p, mask_p, projected_r, projected_g, settings)

    gates = _gates(projected_g, bias_ptr, alpha_ptr, settings)
    if not settings.identity:
        valid, at_ij = _cells(settings)
        res = _sinkhorn(_logits(projected_r, bias_ptr, alpha_ptr, settings), None, mask_p, iterations, settings)
        tl.store(outputs[3] + (p * n * n)[:, None, None] + at_ij, res, mask_p[:, None, None] & valid)
    post_column, mask_post = _post_columns(settings)
    post_mask = mask_p[:, None] & mask_post[None, :]
    post = gates * settings.post_scale + settings.post_eps
    tl.store(post_ptr + (p * n)[:, None] + post_column[None, :], post, post_mask)
    pre = _pre(gates, settings)
    # the values that follow were written by other threads
    tl.debug_barrier()
    read_streams(read_ptr, new_ptr if PENDING else sources[0], pre, p, mask_p, d, settings)


@triton.jit
def mhc_backward(sources, new_ptr, parameters, kept, grads, grad_sources, scratch, iterations, positions, d, settings):
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    phi_ptr, bias_ptr, alpha_ptr = parameters
    projected_ptr, scale_ptr = kept
    grad_read_ptr, grad_new_ptr, grad_post_ptr = grads[0], grads[1], grads[2]
    grad_projected_ptr, partial_ptr = scratch[0], scratch[1]
    p, mask_p = rows(positions, settings)
    r, mask_r, g, mask_g = _columns(settings)
    grad_pre = pre_gradient(grad_read_ptr, new_ptr, p, mask_p, d, settings)

    # the maps
    m: tl.constexpr = n * 2 if settings.identity else n * (n + 2)
    projected_ptr += (p * m)[:, None]
    projected_g = load_fp32(projected_ptr, g[None, :], mask_p[:, None] & mask_g[None, :])
    gates = _gates(projected_g, bias_ptr, alpha_ptr, settings)
    post_column, mask_post = _post_columns(settings)
    grad_post_ptr += (p * n)[:, None]
    grad_gates = load_fp32(grad_post_ptr, post_column[None, :], mask_p[:, None] & mask_post[None, :])
    grad_gates *= settings.post_scale
    for i in tl.static_range(n):
        grad_gates = tl.where(tl.arange(0, 16)[None, :] == i, grad_pre[i][:, None], grad_gates)
    grad_g = grad_gates * gates * (1 - gates)
    # the sums over the positions of this program: the gradients of the bias, then of alpha
    partial_ptr += tl.program_id(0) * (m + (2 if settings.identity else 3))
    tl.store(partial_ptr + g, tl.sum(grad_g, axis=0), mask_g)
    grad_alpha_g = tl.sum(grad_g * projected_g, axis=0)
    tl.store(partial_ptr + m, tl.sum(tl.where(mask_post, 0.0, grad_alpha_g), axis=0))
    tl.store(partial_ptr + m + 1, tl.sum(tl.where(mask_post, grad_alpha_g, 0.0), axis=0))
    # the projection: the gradient of rms(X') is parallel to X'
    scale = tl.load(scale_ptr + p, mask_p, other=0.0)
    grad_g *= load_fp32(alpha_ptr, g // n, mask_g)[None, :]
    along = tl.sum(grad_g * projected_g, axis=1)
    grad_g *= scale[:, None]
    if settings.identity:
        grad_r = grad_g
    else:
        projected_r = load_fp32(projected_ptr, r[None, :], mask_p[:, None] & mask_r[None, :])
        logits = _logits(projected_r, bias_ptr, alpha_ptr, settings)
        grad_r = _sinkhorn_backward(logits, grads[3], scratch[2], p, mask_p, iterations, settings)
        grad_r = tl.reshape(grad_r, projected_r.shape)
        tl.store(partial_ptr + r, tl.sum(grad_r, axis=0), mask_r)
        tl.store(partial_ptr + m + 2, tl.sum(tl.sum(grad_r * projected_r, axis=1), axis=0))
        grad_r *= tl.load(alpha_ptr + 2).to(tl.float32)
        along += tl.sum(grad_r * projected_r, axis=1)
        grad_r *= scale[:, None]
    along = -along * scale * scale / (d * n)
    _store_columns(grad_projected_ptr, p, mask_p, grad_r, grad_g, settings)
    low_r, low_g = grad_r.to(settings.dtype), grad_g.to(settings.dtype)
    pre = _pre(gates, settings)

    # the streams
    if PENDING:
        maps = load_maps(sources, p, mask_p, settings)
        grad_maps = zeros(p.shape, n if settings.identity else n + n * n)
    for start in range(0, d, settings.columns):
        column, mask_c, at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        grad_read = load_fp32(grad_read_ptr, at_y, mask)
        tiles = ()
        for i in tl.static_range(n):
            grad = pre[i][:, None] * grad_read + along[:, None] * load_fp32(new_ptr + at_x, i * d, mask)
            if PENDING:
                grad += load_fp32(grad_new_ptr + at_x, i * d, mask)
            phi = phi_ptr + i * d + column[None, :]
            if not settings.identity:
                phi_r = tl.load(phi + (r * (d * n))[:, None], mask_r[:, None] & mask_c[None, :], other=0.0)
                grad = tl.dot(low_r, phi_r, grad, input_precision="ieee")
            phi_g = tl.load(phi + (g * (d * n))[:, None], mask_g[:, None] & mask_c[None, :], other=0.0)
            grad = tl.dot(low_g, phi_g, grad, input_precision="ieee")
            if PENDING:
                tiles += (grad,)
            else:
                store_as(grad_sources[0] + at_x, i * d, grad, mask)
        if PENDING:
            grad_maps = write_backward(tiles, grad_maps, maps, sources, grad_sources, at_x, at_y, mask, d, settings)
    if PENDING:
        store_grad_maps(grad_sources, grad_maps, p, mask_p, settings)


@triton.jit
def _columns(settings):
    """Return the index among the m and the mask of the columns of H_res, then those of H_pre and H_post."""
    n: tl.constexpr = settings.n
    of_res, of_gates = tl.arange(0, settings.padded * settings.padded), tl.arange(0, 16)
    i, j = of_res // settings.padded, of_res % settings.padded
    half, stream = of_gates // settings.padded, of_gates % settings.padded
    return i * n + j + 2 * n, (i < n) & (j < n), half * n + stream, (half < 2) & (stream < n)


@triton.jit
def _post_columns(settings):
    """Return the stream and the mask of the columns of H_post among those of H_pre and H_post."""
    stream = tl.arange(0, 16) - settings.padded
    return stream, (stream >= 0) & (stream < settings.n)


@triton.jit
def _cells(settings):
    """Return the mask of the cells [i, j] that are not padding, and their index among n * n."""
    i, j = tl.arange(0, settings.padded)[None, :, None], tl.arange(0, settings.padded)[None, None, :]
    return (i < settings.n) & (j < settings.n), i * settings.n + j


@triton.jit
def _store_columns(ptr, p, mask_p, values_r, values_g, settings):
    """Store both parts of a matrix [p, m]. If H_res is the identity, values_r is not used."""
    r, mask_r, g, mask_g = _columns(settings)
    ptr += (p * (settings.n * 2 if settings.identity else settings.n * (settings.n + 2)))[:, None]
    if not settings.identity:
        store_as(ptr, r[None, :], values_r, mask_p[:, None] & mask_r[None, :])
    store_as(ptr, g[None, :], values_g, mask_p[:, None] & mask_g[None, :])


@triton.jit
def _gates(projected_g, bias_ptr, alpha_ptr, settings):
    """Return the sigmoid of the logits of H_pre and H_post."""
    _, _, g, mask_g = _columns(settings)
    alpha_g = load_fp32(alpha_ptr, g // settings.n, mask_g)
    return tl.sigmoid(alpha_g[None, :] * projected_g + load_fp32(bias_ptr, g, mask_g)[None, :])


@triton.jit
def _logits(projected_r, bias_ptr, alpha_ptr, settings):
    """Return the logits of H_res, [p, i, j]."""
    r, mask_r, _, _ = _columns(settings)
    logits_r = tl.load(alpha_ptr + 2).to(tl.float32) * projected_r + load_fp32(bias_ptr, r, mask_r)[None, :]
    return tl.reshape(logits_r, (settings.positions, settings.padded, settings.padded))


@triton.jit
def _pre(gates, settings):
    """Return H_pre as vectors."""
    pre = ()
    for i in tl.static_range(settings.n):
        pre += (tl.sum(tl.where(tl.arange(0, 16)[None, :] == i, gates, 0.0), axis=1) + settings.pre_eps,)
    return pre


@triton.jit
def _sinkhorn(logits_pij, sums_ptr, mask_p, iterations, settings):
    """Scale exp(logits) so that rows and columns sum to 1. Store the sums of all iterations unless sums_ptr is None."""
    valid, _ = _cells(settings)
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
                tl.store(sums_ptr + (2 * k + axis - 1) * settings.padded, sums, mask_p[:, None])
            m = m / tl.expand_dims(sums, axis)
            if settings.res_eps > 0:
                m = tl.where(valid & (k == 0) & (axis == 1), m + settings.res_eps, m)
    return m


@triton.jit
def _sinkhorn_backward(logits_pij, grad_ptr, sums_ptr, p, mask_p, iterations, settings):
    """Return the gradient of the logits.

    The iterations run again and store their sums, a few numbers each, at sums_ptr. The backward pass recovers each
    iterate as the next iterate times its sums.
    """
    start = (p * iterations * (2 * settings.padded))[:, None]
    sums_ptr += start + tl.arange(0, settings.padded)[None, :]
    m = _sinkhorn(logits_pij, sums_ptr, mask_p, iterations, settings)
    # the values that follow were written by other threads
    tl.debug_barrier()
    valid, at_ij = _cells(settings)
    grad = load_fp32(grad_ptr, (p * settings.n * settings.n)[:, None, None] + at_ij, mask_p[:, None, None] & valid)
    for back in range(iterations):
        for axis in tl.static_range(2, 0, -1):
            at = sums_ptr + (2 * (iterations - 1 - back) + axis - 1) * settings.padded
            sums = tl.expand_dims(tl.load(at, mask_p[:, None], other=1.0), axis)
            if settings.res_eps > 0:
                m = tl.where(valid & (back == iterations - 1) & (axis == 1), m - settings.res_eps, m)
            # m = before / s: d before = (d m - sum(d m * m)) / s
            grad = tl.where(valid, (grad - tl.expand_dims(tl.sum(grad * m, axis=axis), axis)) / sums, 0.0)
            m = m * sums
    return grad * m
