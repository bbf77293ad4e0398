# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`mhc_post_pre` in Triton, two kernels in each direction.

Forward, the first one writes and projects the new streams; the second one computes the maps and reads. Backward, the
first one passes the gradients through the read and the maps; the second one computes those of the sources.

Shapes: b batch, t tokens, p positions (batch and tokens), n streams, i new stream, j old stream, d hidden size,
m = n (n + 2) or, if H_res is the identity, 2 n: H_pre, H_post and H_res in this order, k column of
the projection.
"""

import torch
from torch import Tensor

from depthlm.ops.autograd import present
from depthlm.ops.dtypes import compute_dtype, no_autocast
from depthlm.ops.library import register
from depthlm.ops.mhc.cpu import PAPER, Form, Parameters, Pending, Result
from depthlm.ops.mhc.triton_streams import (
    Tensors,
    add_columns,
    check_streams,
    empty_outputs,
    launch,
    load_maps,
    load_pending,
    load_shared,
    load_vectors,
    mixed_tile,
    pre_gradient,
    read_streams,
    rounded,
    rows,
    settings_of,
    store_grad_maps,
    tile,
    write_and_read,
    write_backward,
    zeros,
)
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import cdiv, load_fp32, store_as, tl, triton

_TILES = tiles_of("mhc")
# positions of a program, by the predicted times: of the kernel with a matrix product, and of the others
PROJECTED_POSITIONS = _TILES["PROJECTED_POSITIONS"]
POSITIONS = _TILES["POSITIONS"]


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
    *outputs, scaled_phi = _outputs(sources, parameters, eps, iterations, form, dtype)
    if norm:
        torch.mul(norm[0], phi, out=scaled_phi)
    else:
        scaled_phi.copy_(phi)
    read, new, post, *res, projected, scale = outputs
    identity = len(alpha) == 2
    settings = settings_of(sources[0], eps, PROJECTED_POSITIONS, identity, form)
    launch(mhc_write_and_project, sources, scaled_phi, [new, projected, scale], settings)
    settings = settings_of(sources[0], eps, POSITIONS, identity, form)
    # the streams that are read are the first source
    read_from = [new] if len(sources) > 1 else sources
    launch(mhc_maps_and_read, read_from, [bias, alpha], [projected, scale], [read, post, *res], iterations, settings)
    return [*outputs, scaled_phi]


@register(__name__, "mhc_post_pre_backward", _gradients)
def backward(
    grads: Tensors, sources: Tensors, new: Tensor, parameters: Tensors, kept: Tensors,
    eps: float, iterations: int, form: list[float], dtype: torch.dtype,
) -> Tensors:  # fmt: skip
    """Return the gradients of the sources, phi and the norm, and those of bias and alpha in one tensor."""
    phi, *norm, bias, alpha = parameters
    identity = len(alpha) == 2
    projected, scale, scaled_phi = kept
    b, t, n, d = new.shape
    settings = settings_of(new, eps, POSITIONS, identity, form)
    grad_sources = [torch.empty_like(x) for x in sources]
    grad_projected = torch.empty_like(projected, dtype=new.dtype)
    partial_sums = scale.new_empty(cdiv(b * t, settings.positions.value), len(bias) + len(alpha))
    sums = [] if identity else [scale.new_empty(b * t, iterations, 2, settings.padded_n.value)]
    factors = scale.new_empty(b * t, n + 1)
    scratch = [grad_projected, factors, partial_sums, *sums]
    launch(mhc_maps_backward, [new], [bias, alpha], [projected, scale], grads, scratch, iterations, settings)
    launch(mhc_streams_backward, sources, new, scaled_phi, grads, grad_sources, [grad_projected, factors], settings)
    with no_autocast(new):
        # in the dtype of the streams: a copy of them in another one would move more bytes than the product
        grad_phi = (grad_projected.view(b * t, -1).mT @ new.view(b * t, n * d)).to(phi.dtype)
    grads_of_product = [grad_phi * norm[0], (grad_phi * phi).sum(0)] if norm else [grad_phi]
    return [*grad_sources, *grads_of_product, partial_sums.sum(0)]


@triton.jit
def mhc_write_and_project(sources, phi_ptr, outputs, positions, d: tl.constexpr, settings):
    """Store X', its products with phi, and 1 / rms."""
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    m: tl.constexpr = settings.m
    new_ptr, projected_ptr, scale_ptr = outputs
    p, mask_p = rows(positions, settings)
    k = tl.arange(0, settings.padded_m)
    projected = tl.zeros([settings.positions, settings.padded_m], tl.float32)
    squares = tl.zeros([settings.positions, settings.lanes], tl.float32)
    for start in range(0, d, settings.columns):
        at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        column = start + tl.arange(0, settings.columns)
        mask_phi = (column < d)[:, None] & (k < m)[None, :]
        if PENDING:
            y, old = load_pending(sources, at_x, at_y, mask, d, settings)
        # a loop over the streams that is not unrolled: else all maps and tiles of phi are held at once, and spilled
        for i in range(n):
            if PENDING:
                mixed = mixed_tile(sources, i, p, mask_p, at_x, mask, y, old, d, settings)
                new = mixed.to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + at_x + i * d, new, mask)
            else:
                new = tl.load(sources[0] + at_x + i * d, mask, other=0.0)
            squares = add_columns(squares, new.to(tl.float32) * new.to(tl.float32))
            phi = tl.load(phi_ptr + i * d + column[:, None] + (k * (d * n))[None, :], mask_phi, other=0.0)
            projected = tl.dot(new.to(phi.dtype), phi, projected, input_precision="tf32x3")
    tl.store(projected_ptr + (p * m)[:, None] + k[None, :], projected, mask_p[:, None] & (k < m)[None, :])
    tl.store(scale_ptr + p, tl.rsqrt(tl.sum(squares, axis=1) / (d * n) + settings.eps), mask_p)


@triton.jit
def mhc_maps_and_read(sources, parameters, kept, outputs, iterations, positions, d: tl.constexpr, settings):
    """Compute the maps from the projection; store H_pre X', H_post and H_res."""
    n: tl.constexpr = settings.n
    p, mask_p = rows(positions, settings)
    stream = tl.arange(0, settings.padded_n)[None, :]
    _, post = _load_gates(1, parameters, kept, p, mask_p, settings)
    post_ptr = outputs[1] + (p * n)[:, None] + stream
    tl.store(post_ptr, post * settings.post_scale + settings.post_eps, mask_p[:, None] & (stream < n))
    if not settings.identity:
        valid, at_ij = _cells(settings)
        _, logits = _load_res(parameters, kept, p, mask_p, settings)
        res = _sinkhorn(logits, None, mask_p, iterations, settings)
        tl.store(outputs[2] + (p * n * n)[:, None, None] + at_ij, res, mask_p[:, None, None] & valid)
    _, gates = _load_gates(0, parameters, kept, p, mask_p, settings)
    pre = ()
    for i in tl.static_range(n):
        pre += (tl.sum(tl.where(stream == i, gates, 0.0), axis=1) + settings.pre_eps,)
    read_streams(outputs[0], sources[0], pre, p, mask_p, d, settings)


@triton.jit
def mhc_maps_backward(sources, parameters, kept, grads, scratch, iterations, positions, d: tl.constexpr, settings):
    """Store the gradients of the projection, and partial sums of those of the bias and alpha.

    Store the factors of the gradient of X', too: H_pre, which multiplies that of the read, and the factor of X', since
    the gradient of rms(X') is parallel to it.
    """
    n: tl.constexpr = settings.n
    m: tl.constexpr = settings.m
    grad_projected_ptr, factors_ptr, partial_ptr = scratch[0], scratch[1], scratch[2]
    p, mask_p = rows(positions, settings)
    stream = tl.arange(0, settings.padded_n)[None, :]
    mask = mask_p[:, None] & (stream < n)
    grad_pre = pre_gradient(grads[0], sources[0], p, mask_p, d, settings)
    scale = tl.load(kept[1] + p, mask_p, other=0.0)
    partial_ptr += tl.program_id(0).to(tl.int64) * (m + (2 if settings.identity else 3))
    along = tl.zeros(p.shape, tl.float32)
    for part in tl.static_range(2):
        projected, gates = _load_gates(part, parameters, kept, p, mask_p, settings)
        if part == 0:
            tl.store(factors_ptr + (p * (n + 1))[:, None] + stream, gates + settings.pre_eps, mask)
            grad = tl.zeros(gates.shape, tl.float32)
            for i in tl.static_range(n):
                grad = tl.where(stream == i, grad_pre[i][:, None], grad)
        else:
            grad = load_fp32(grads[2], (p * n)[:, None] + stream, mask) * settings.post_scale
        grad = rounded(grad * (gates * (1 - gates)))
        tl.store(partial_ptr + part * n + stream, tl.sum(grad, axis=0)[None, :], stream < n)
        grad_alpha, alpha = tl.sum(rounded(grad * projected), axis=1), tl.load(parameters[1] + part).to(tl.float32)
        tl.store(partial_ptr + m + part, tl.sum(grad_alpha, axis=0))
        along -= alpha * grad_alpha
        store_as(grad_projected_ptr + part * n, (p * m)[:, None] + stream, alpha * grad * scale[:, None], mask)
    if not settings.identity:
        valid, at_ij = _cells(settings)
        projected, logits = _load_res(parameters, kept, p, mask_p, settings)
        grad = _sinkhorn_backward(logits, grads[3], scratch[3], p, mask_p, iterations, settings)
        tl.store(partial_ptr + 2 * n + at_ij, tl.sum(grad, axis=0)[None, :, :], valid)
        grad_alpha = tl.sum(tl.sum(rounded(grad * projected), axis=2), axis=1)
        alpha = tl.load(parameters[1] + 2).to(tl.float32)
        tl.store(partial_ptr + m + 2, tl.sum(grad_alpha, axis=0))
        along -= alpha * grad_alpha
        grad_projected, at = alpha * grad * scale[:, None, None], (p * m)[:, None, None] + at_ij
        store_as(grad_projected_ptr + 2 * n, at, grad_projected, mask_p[:, None, None] & valid)
    tl.store(factors_ptr + p * (n + 1) + n, along * scale * scale / (d * n), mask_p)


@triton.jit
def mhc_streams_backward(sources, new_ptr, phi_ptr, grads, grad_sources, scratch, positions, d: tl.constexpr, settings):
    """Store the gradients of the sources.

    The products with phi are sums in fp32 rather than matrix products: the tiles of streams would go through shared
    memory on their way to tensor cores and back, which takes longer than the multiplications.
    """
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    m: tl.constexpr = settings.m
    grad_projected_ptr, factors_ptr = scratch
    p, mask_p = rows(positions, settings)
    factors = load_vectors(factors_ptr, p, mask_p, n + 1)
    if PENDING:
        maps = load_maps(sources, p, mask_p, settings)
        grad_maps = zeros([settings.positions, settings.lanes], n if settings.identity else n + n * n)
    for start in range(0, d, settings.columns):
        at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        grad_read, grad_new = load_fp32(grads[0], at_y, mask), ()
        for i in tl.static_range(n):
            grad = factors[i][:, None] * grad_read + factors[n][:, None] * load_fp32(new_ptr + at_x, i * d, mask)
            if PENDING:
                grad += load_fp32(grads[1] + at_x, i * d, mask)
            grad_new += (grad,)
        for part in range(m // n):
            for c in tl.static_range(n):
                k, sums = part * n + c, ()
                grad_projected = load_fp32(grad_projected_ptr + p * m, k, mask_p)[:, None]
                for i in tl.static_range(n):
                    phi = load_shared(phi_ptr, k * n + i, start, d, settings)
                    sums += (grad_new[i] + grad_projected * phi,)
                grad_new = sums
        if PENDING:
            grad_maps = write_backward(grad_new, grad_maps, maps, sources, grad_sources, at_x, at_y, mask, d, settings)
        else:
            for i in tl.static_range(n):
                store_as(grad_sources[0] + at_x, i * d, grad_new[i], mask)
    if PENDING:
        store_grad_maps(grad_sources, grad_maps, p, mask_p, settings)


@triton.jit
def _load_gates(part: tl.constexpr, parameters, kept, p, mask_p, settings):
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
def _load_res(parameters, kept, p, mask_p, settings):
    """Return the projection and the logits of H_res, [p, i, j]."""
    n: tl.constexpr = settings.n
    valid, at_ij = _cells(settings)
    at, scale = (p * settings.m + 2 * n)[:, None, None] + at_ij, tl.load(kept[1] + p, mask_p, other=0.0)
    projected = load_fp32(kept[0], at, mask_p[:, None, None] & valid) * scale[:, None, None]
    alpha, bias = tl.load(parameters[1] + 2).to(tl.float32), load_fp32(parameters[0] + 2 * n, at_ij, valid)
    return projected, alpha * projected + bias


@triton.jit
def _cells(settings):
    """Return the mask of the cells [i, j] that are not padding, and their index among n * n."""
    i, j = tl.arange(0, settings.padded_n)[None, :, None], tl.arange(0, settings.padded_n)[None, None, :]
    return (i < settings.n) & (j < settings.n), i * settings.n + j


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
                tl.store(sums_ptr + (2 * k + axis - 1) * settings.padded_n, sums, mask_p[:, None])
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
    start = (p * iterations * (2 * settings.padded_n))[:, None]
    sums_ptr += start + tl.arange(0, settings.padded_n)[None, :]
    m = _sinkhorn(logits_pij, sums_ptr, mask_p, iterations, settings)
    # the values that follow were written by other threads
    tl.debug_barrier()
    valid, at_ij = _cells(settings)
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
