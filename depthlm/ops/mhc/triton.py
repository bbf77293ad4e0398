# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`mhc_post_pre` in Triton, two kernels in each direction.

Forward, the first one writes and projects the new streams; the second one computes the maps and reads. Backward, the
first one passes the gradients through the read and the maps; the second one computes those of the sources.

With a given H_pre the first kernel reads, too, and the streams are walked once in each direction: the second one only
computes the maps, and backward the gradient of H_pre is given.

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
from depthlm.ops.mhc.triton_maps import cells, load_gates, load_res, sinkhorn, sinkhorn_backward
from depthlm.ops.mhc.triton_reads import add_pre_gradient, pre_gradient, read_streams
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
    pre_btn: Tensor | None = None,
) -> Result:
    """Run `depthlm.ops.mhc.naive.mhc_post_pre` in Triton."""
    n, d = x_btnd.shape[2:]
    phi_mw, norm_w, alpha, bias_m = parameters
    identity, late = len(alpha) == 2, pre_btn is not None
    m, w = n * (2 if identity else n + 2), n * d
    shapes = {"phi": (phi_mw, (m, w)), "alpha": (alpha, (2 if identity else 3,)), "bias": (bias_m, (m,))}
    if norm_w is not None:
        shapes["norm"] = norm_w, (w,)
    if pre_btn is not None:
        shapes["pre"] = pre_btn, x_btnd.shape[:3]
    check_streams("mhc", x_btnd, pending, **shapes)
    settings = eps, iterations, list(form), compute_dtype(x_btnd), late
    weights = [*present(pre_btn), phi_mw, *present(norm_w), bias_m, alpha]
    return write_and_read((forward, backward), x_btnd, pending, weights, settings, rebuild, identity, late)


def _outputs(sources, parameters, eps, iterations, form, dtype, late):
    (b, t, n, _), phi = sources[0].shape, parameters[late]
    shapes = [[b, t, n]] * late + [[b, t, len(phi)], [b, t]]
    outputs = empty_outputs(sources, *shapes, identity=len(parameters[-1]) == 2)
    return [*outputs, phi.new_empty(phi.shape, dtype=dtype)]


def _gradients(grads, sources, new, parameters, kept, eps, iterations, form, dtype, late):
    *separate, bias, alpha = parameters
    return [*map(torch.empty_like, [*sources, *separate]), kept[1].new_empty(len(bias) + len(alpha))]


@register("mhc_post_pre", _outputs)
def forward(
    sources: Tensors, parameters: Tensors, eps: float, iterations: int, form: list[float], dtype: torch.dtype,
    late: bool,
) -> Tensors:  # fmt: skip
    """Return input_btd, X'_btnd, post_btn, res_btij, pre_btn, projected_btm, 1 / rms_bt, and phi times the norm.

    parameters: with `late` the H_pre of the read; phi, the weight of the norm if it has one, bias and alpha. res_btij
    is left out if H_res is the identity, and pre_btn without `late`. dtype: of phi times the norm.
    """
    given_pre, (phi, *norm, bias, alpha) = parameters[:late], parameters[late:]
    *outputs, scaled_phi = _outputs(sources, parameters, eps, iterations, form, dtype, late)
    if norm:
        torch.mul(norm[0], phi, out=scaled_phi)
    else:
        scaled_phi.copy_(phi)
    read, new, post, *maps, projected, scale = outputs
    identity = len(alpha) == 2
    settings = settings_of(sources[0], eps, PROJECTED_POSITIONS, identity, form)
    kept = [projected, scale]
    launch(mhc_write_and_project, sources, [scaled_phi, *given_pre], [new, *kept, read], settings)
    settings = settings_of(sources[0], eps, POSITIONS, identity, form)
    # the streams that are read are the first source
    read_from = [new] if len(sources) > 1 else sources
    results = [maps.pop() if late else read, post, *maps]
    launch(mhc_maps_and_read, read_from, [bias, alpha, *given_pre], kept, results, iterations, settings)
    return [*outputs, scaled_phi]


@register("mhc_post_pre_backward", _gradients)
def backward(
    grads: Tensors, sources: Tensors, new: Tensor, parameters: Tensors, kept: Tensors,
    eps: float, iterations: int, form: list[float], dtype: torch.dtype, late: bool,
) -> Tensors:  # fmt: skip
    """Return the gradients of the sources, of the parameters but bias and alpha, and of those two in one tensor."""
    given_pre, (phi, *norm, bias, alpha) = parameters[:late], parameters[late:]
    identity = len(alpha) == 2
    projected, scale, scaled_phi = kept
    b, t, n, d = new.shape
    settings = settings_of(new, eps, POSITIONS, identity, form)
    grad_sources, grad_pre = ([torch.empty_like(x) for x in tensors] for tensors in (sources, given_pre))
    grad_projected = torch.empty_like(projected, dtype=new.dtype)
    partial_sums = scale.new_empty(cdiv(b * t, settings.positions.value), len(bias) + len(alpha))
    sums = [] if identity else [scale.new_empty(b * t, iterations, 2, settings.padded_n.value)]
    factors = scale.new_empty(b * t, n + 1)
    scratch = [grad_projected, factors, partial_sums, *sums]
    of_maps = [bias, alpha, *given_pre]
    launch(mhc_maps_backward, [new], of_maps, [projected, scale], grads, scratch, iterations, settings)
    scratch = [grad_projected, factors, *grad_pre]
    launch(mhc_streams_backward, sources, new, scaled_phi, grads, grad_sources, scratch, settings)
    with no_autocast(new):
        # in the dtype of the streams: a copy of them in another one would move more bytes than the product
        grad_phi = (grad_projected.view(b * t, -1).mT @ new.view(b * t, n * d)).to(phi.dtype)
    grads_of_product = [grad_phi * norm[0], (grad_phi * phi).sum(0)] if norm else [grad_phi]
    return [*grad_sources, *grad_pre, *grads_of_product, partial_sums.sum(0)]


@triton.jit
def mhc_write_and_project(sources, weights, outputs, positions, d: tl.constexpr, settings):
    """Store X', its products with phi, and 1 / rms, and with a given H_pre also H_pre X'."""
    PENDING: tl.constexpr = len(sources) > 1
    LATE: tl.constexpr = len(weights) > 1
    n: tl.constexpr = settings.n
    m: tl.constexpr = settings.m
    new_ptr, projected_ptr, scale_ptr, read_ptr = outputs
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
        if LATE:
            read = tl.zeros(mask.shape, tl.float32)
        # a loop over the streams that is not unrolled: else all maps and tiles of phi are held at once, and spilled
        for i in range(n):
            if PENDING:
                mixed = mixed_tile(sources, i, p, mask_p, at_x, mask, y, old, d, settings)
                new = mixed.to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + at_x + i * d, new, mask)
            else:
                new = tl.load(sources[0] + at_x + i * d, mask, other=0.0)
            squares = add_columns(squares, new.to(tl.float32) * new.to(tl.float32))
            if LATE:
                read += load_fp32(weights[1] + p * n, i, mask_p)[:, None] * new.to(tl.float32)
            phi = tl.load(weights[0] + i * d + column[:, None] + (k * (d * n))[None, :], mask_phi, other=0.0)
            projected = tl.dot(new.to(phi.dtype), phi, projected, input_precision="tf32x3")
        if LATE:
            store_as(read_ptr, at_y, read, mask)
    tl.store(projected_ptr + (p * m)[:, None] + k[None, :], projected, mask_p[:, None] & (k < m)[None, :])
    tl.store(scale_ptr + p, tl.rsqrt(tl.sum(squares, axis=1) / (d * n) + settings.eps), mask_p)


@triton.jit
def mhc_maps_and_read(sources, parameters, kept, outputs, iterations, positions, d: tl.constexpr, settings):
    """Compute the maps from the projection; store H_pre X', or H_pre if that of the read is given, H_post and H_res."""
    n: tl.constexpr = settings.n
    p, mask_p = rows(positions, settings)
    stream = tl.arange(0, settings.padded_n)[None, :]
    _, post = load_gates(1, parameters, kept, p, mask_p, settings)
    post_ptr = outputs[1] + (p * n)[:, None] + stream
    tl.store(post_ptr, post * settings.post_scale + settings.post_eps, mask_p[:, None] & (stream < n))
    if not settings.identity:
        valid, at_ij = cells(settings)
        _, logits = load_res(parameters, kept, p, mask_p, settings)
        res = sinkhorn(logits, None, mask_p, iterations, settings)
        tl.store(outputs[2] + (p * n * n)[:, None, None] + at_ij, res, mask_p[:, None, None] & valid)
    _, gates = load_gates(0, parameters, kept, p, mask_p, settings)
    if len(parameters) > 2:
        tl.store(outputs[0] + (p * n)[:, None] + stream, gates + settings.pre_eps, mask_p[:, None] & (stream < n))
    else:
        pre = ()
        for i in tl.static_range(n):
            pre += (tl.sum(tl.where(stream == i, gates, 0.0), axis=1) + settings.pre_eps,)
        read_streams(outputs[0], sources[0], pre, p, mask_p, d, settings)


@triton.jit
def mhc_maps_backward(sources, parameters, kept, grads, scratch, iterations, positions, d: tl.constexpr, settings):
    """Store the gradients of the projection, and partial sums of those of the bias and alpha.

    Store the factors of the gradient of X', too: the H_pre of the read, which multiplies its gradient, and the factor
    of X', since the gradient of rms(X') is parallel to it.
    """
    LATE: tl.constexpr = len(parameters) > 2
    n: tl.constexpr = settings.n
    m: tl.constexpr = settings.m
    grad_projected_ptr, factors_ptr, partial_ptr = scratch[0], scratch[1], scratch[2]
    p, mask_p = rows(positions, settings)
    stream = tl.arange(0, settings.padded_n)[None, :]
    mask = mask_p[:, None] & (stream < n)
    if not LATE:
        grad_pre = pre_gradient(grads[0], sources[0], p, mask_p, d, settings)
    scale = tl.load(kept[1] + p, mask_p, other=0.0)
    partial_ptr += tl.program_id(0).to(tl.int64) * (m + (2 if settings.identity else 3))
    along = tl.zeros(p.shape, tl.float32)
    for part in tl.static_range(2):
        projected, gates = load_gates(part, parameters, kept, p, mask_p, settings)
        if part == 0 and LATE:
            given_pre = load_fp32(parameters[2], (p * n)[:, None] + stream, mask)
            tl.store(factors_ptr + (p * (n + 1))[:, None] + stream, given_pre, mask)
            grad = load_fp32(grads[-1], (p * n)[:, None] + stream, mask)
        elif part == 0:
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
        valid, at_ij = cells(settings)
        projected, logits = load_res(parameters, kept, p, mask_p, settings)
        grad = sinkhorn_backward(logits, grads[3], scratch[3], p, mask_p, iterations, settings)
        tl.store(partial_ptr + 2 * n + at_ij, tl.sum(grad, axis=0)[None, :, :], valid)
        grad_alpha = tl.sum(tl.sum(rounded(grad * projected), axis=2), axis=1)
        alpha = tl.load(parameters[1] + 2).to(tl.float32)
        tl.store(partial_ptr + m + 2, tl.sum(grad_alpha, axis=0))
        along -= alpha * grad_alpha
        grad_projected, at = alpha * grad * scale[:, None, None], (p * m)[:, None, None] + at_ij
        store_as(grad_projected_ptr + 2 * n, at, grad_projected, mask_p[:, None, None] & valid)
    tl.store(factors_ptr + p * (n + 1) + n, along * scale * scale / (d * n), mask_p)


@triton.jit
def _projection_backward(grad_new, grad_projected_ptr, phi_ptr, p, mask_p, start, d: tl.constexpr, settings):
    """Return the gradients of the tiles of X' with those by the projection.

    The products with phi are sums in fp32 rather than matrix products: the tiles of streams would go through shared
    memory on their way to tensor cores and back, which takes longer than the multiplications.
    """
    n: tl.constexpr = settings.n
    m: tl.constexpr = settings.m
    for part in range(m // n):
        for c in tl.static_range(n):
            k, sums = part * n + c, ()
            grad_projected = load_fp32(grad_projected_ptr + p * m, k, mask_p)[:, None]
            for i in tl.static_range(n):
                phi = load_shared(phi_ptr, k * n + i, start, d, settings)
                sums += (grad_new[i] + grad_projected * phi,)
            grad_new = sums
    return grad_new


@triton.jit
def mhc_streams_backward(sources, new_ptr, phi_ptr, grads, grad_sources, scratch, positions, d: tl.constexpr, settings):
    """Store the gradients of the sources, and of the given H_pre."""
    PENDING: tl.constexpr = len(sources) > 1
    LATE: tl.constexpr = len(scratch) > 2
    n: tl.constexpr = settings.n
    grad_projected_ptr, factors_ptr = scratch[0], scratch[1]
    p, mask_p = rows(positions, settings)
    if LATE:
        grad_pre = zeros([settings.positions, settings.lanes], n)
    else:
        factors = load_vectors(factors_ptr, p, mask_p, n + 1)
    if PENDING:
        if not LATE:
            maps = load_maps(sources, p, mask_p, settings)
        grad_maps = zeros([settings.positions, settings.lanes], n if settings.identity else n + n * n)
    for start in range(0, d, settings.columns):
        at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        if LATE:
            # factors and maps for each chunk, since they would not fit into registers beside n more sums
            factors = load_vectors(factors_ptr, p, mask_p, n + 1)
        grad_read, grad_new = load_fp32(grads[0], at_y, mask), ()
        for i in tl.static_range(n):
            grad = factors[i][:, None] * grad_read + factors[n][:, None] * load_fp32(new_ptr + at_x, i * d, mask)
            if PENDING:
                grad += load_fp32(grads[1] + at_x, i * d, mask)
            grad_new += (grad,)
        grad_new = _projection_backward(grad_new, grad_projected_ptr, phi_ptr, p, mask_p, start, d, settings)
        if PENDING:
            if LATE:
                maps = load_maps(sources, p, mask_p, settings)
            grad_maps = write_backward(grad_new, grad_maps, maps, sources, grad_sources, at_x, at_y, mask, d, settings)
        else:
            for i in tl.static_range(n):
                store_as(grad_sources[0] + at_x, i * d, grad_new[i], mask)
        if LATE:
            # loads X' again, from the L1 cache: together with the gradients of X', it would not fit into registers
            grad_pre = add_pre_gradient(grad_pre, grads[0], new_ptr, at_x, at_y, mask, d, settings)
    if LATE:
        for i in tl.static_range(n):
            store_as(scratch[2] + p * n, i, tl.sum(grad_pre[i], axis=1), mask_p)
    if PENDING:
        store_grad_maps(grad_sources, grad_maps, p, mask_p, settings)
