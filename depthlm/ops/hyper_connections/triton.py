# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`hyper_post_pre` in Triton. The first pass writes and projects the new streams, the second one reads them.

The second pass over the columns goes backwards, because the columns that were loaded last are still in the cache.

Shapes: b batch, t tokens, p positions (batch and tokens), n streams, i new stream, j old stream, d hidden size,
k columns of the projection of a stream, n + 2, or c, if padded to the 16 that `tl.dot` requires.
"""

import torch
from torch import Tensor

from depthlm.ops.dtypes import compute_dtype
from depthlm.ops.hyper_connections.cpu import Dynamic, Static
from depthlm.ops.hyper_connections.cpu import hyper_post_pre as static_post_pre
from depthlm.ops.library import register
from depthlm.ops.mhc.cpu import Pending, Result
from depthlm.ops.mhc.triton_streams import (
    FORWARD_WARPS,
    POSITIONS,
    Tensors,
    check_streams,
    empty_outputs,
    launch,
    load_maps,
    load_tiles,
    load_vectors,
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


def hyper_post_pre(
    x_btnd: Tensor, pending: Pending | None, static: Static, dynamic: Dynamic | None, eps: float, rebuild: bool = False
) -> Result:
    """Run `depthlm.ops.hyper_connections.naive.hyper_post_pre` in Triton."""
    if dynamic is None:
        return static_post_pre(x_btnd, pending, static, None, eps, rebuild)
    (n, d), (pre_n, post_n, res_ij), (w_md, scale) = x_btnd.shape[2:], static, dynamic
    shapes = {"static_pre": (pre_n, (n,)), "static_post": (post_n, (n,)), "static_res": (res_ij, (n, n))}
    check_streams("hyper_connections", x_btnd, pending, w=(w_md, (n + 2, d)), scale=(scale, (2,)), **shapes)
    settings = eps, compute_dtype(x_btnd)
    return write_and_read((forward, backward), x_btnd, pending, [w_md, *static, scale], settings, rebuild)


def _outputs(sources, parameters, eps, dtype):
    b, t, n, _ = sources[0].shape
    return empty_outputs(sources, [b, t, n], [b, t, n, n + 2], [b, t, n])


def _gradients(grads, sources, new, parameters, kept, eps, dtype):
    count = sum(parameter.numel() for parameter in parameters)
    return [*map(torch.empty_like, sources), kept[0].new_empty(count)]


@register(__name__, "hyper_post_pre", _outputs)
def forward(sources: Tensors, parameters: Tensors, eps: float, dtype: torch.dtype) -> Tensors:
    """Return input_btd, X'_btnd, post_btn, res_btij, pre_btn, and W x / rms and 1 / rms of each stream."""
    outputs = _outputs(sources, parameters, eps, dtype)
    launch(
        hyper_connections_forward, sources, parameters, outputs, _settings(sources[0], eps, dtype), warps=FORWARD_WARPS
    )
    return outputs


@register(__name__, "hyper_post_pre_backward", _gradients)
def backward(
    grads: Tensors, sources: Tensors, new: Tensor, parameters: Tensors, kept: Tensors, eps: float, dtype: torch.dtype
) -> Tensors:
    """Return the gradients of the sources, and those of all parameters in one tensor."""
    (b, t, _, _), (pre, projected, _), (w, *_, scale) = new.shape, kept, parameters
    grad_sources = [torch.empty_like(x) for x in sources]
    count = sum(parameter.numel() for parameter in parameters)
    # aligned rows, so that they are written in pieces of 128 bits
    width = cdiv(count, 32) * 32
    partial_sums = pre.new_empty(cdiv(b * t, POSITIONS), width)
    tensors = new, [w, scale], kept, grads, grad_sources, [torch.empty_like(projected), partial_sums]
    launch(hyper_connections_backward, sources, *tensors, width, _settings(new, eps, dtype))
    return [*grad_sources, partial_sums[:, :count].sum(0)]


def _settings(x, eps, dtype):
    return settings_of(x, 128 // x.itemsize, eps, dtype)


@triton.jit
def hyper_connections_forward(sources, parameters, outputs, positions, d, settings):
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    w_ptr, static_pre_ptr, static_post_ptr, static_res_ptr, scale_ptr = parameters
    read_ptr, new_ptr, post_ptr, res_ptr, pre_ptr, projected_ptr, inverse_rms_ptr = outputs
    p, mask_p = rows(positions, settings)
    c = tl.arange(0, 16)
    if PENDING:
        maps = load_maps(sources, p, mask_p, settings)
        projected_y = tl.zeros([settings.positions, 16], tl.float32)
    projected, squares = zeros([settings.positions, 16], n), zeros(p.shape, n)
    for start in range(0, d, settings.columns):
        column, mask_c, at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        at_w = column[:, None] + c[None, :] * d
        w = tl.load(w_ptr + at_w, mask_c[:, None] & (c < n + 2)[None, :], other=0.0).to(settings.dtype)
        old = load_tiles(sources[0], at_x, mask, d, settings)
        if PENDING:
            y = load_fp32(sources[1], at_y, mask)
            projected_y = tl.dot(y.to(settings.dtype), w, projected_y, input_precision="ieee")
        sums, sums_of_squares = (), ()
        for i in tl.static_range(n):
            sums += (tl.dot(old[i].to(settings.dtype), w, projected[i], input_precision="ieee"),)
            new = old[i]
            if PENDING:
                rounded = mixed_tile(i, old, y, maps, settings).to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + at_x + i * d, rounded, mask)
                new = rounded.to(tl.float32)
            sums_of_squares += (squares[i] + tl.sum(new * new, axis=1),)
        projected, squares = sums, sums_of_squares

    if PENDING:
        # again, since registers are scarce in the loop, and the projections have another layout
        maps = load_maps(sources, p, mask_p, settings)
    for j in tl.static_range(n):
        inverse_rms = tl.rsqrt(squares[j] / d + settings.eps)
        tl.store(inverse_rms_ptr + p * n + j, inverse_rms, mask_p)
        if PENDING:
            # W x'_i = sum_j res[i, j] W x_j + post[i] W y: as a factor of tl.dot, x'_i would be computed again by
            # every warp
            scaled = mixed_tile(j, projected, projected_y, maps, settings)
        else:
            scaled = projected[j]
        at = ((p * n + j) * (n + 2))[:, None] + c[None, :]
        tl.store(projected_ptr + at, scaled * inverse_rms[:, None], mask_p[:, None] & (c < n + 2)[None, :])
    # the values that follow were written by other threads
    tl.debug_barrier()
    s_pre_res, s_post = tl.load(scale_ptr).to(tl.float32), tl.load(scale_ptr + 1).to(tl.float32)
    pre = ()
    for j in tl.static_range(n):
        m = load_vectors(projected_ptr, p * n + j, mask_p, n + 2)
        pre += (tl.load(static_pre_ptr + j).to(tl.float32) + s_pre_res * tanh(m[0]),)
        tl.store(pre_ptr + p * n + j, pre[j], mask_p)
        post = tl.load(static_post_ptr + j).to(tl.float32) + s_post * tanh(m[1])
        tl.store(post_ptr + p * n + j, post, mask_p)
        for i in tl.static_range(n):
            res = tl.load(static_res_ptr + i * n + j).to(tl.float32) + s_pre_res * tanh(m[2 + i])
            tl.store(res_ptr + p * n * n + i * n + j, res, mask_p)
    read_streams(read_ptr, new_ptr if PENDING else sources[0], pre, p, mask_p, d, settings)


@triton.jit
def hyper_connections_backward(
    sources, new_ptr, parameters, kept, grads, grad_sources, scratch, width, positions, d, settings
):
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    w_ptr, scale_ptr = parameters
    pre_ptr, projected_ptr, inverse_rms_ptr = kept
    grad_read_ptr, grad_new_ptr, grad_post_ptr, grad_res_ptr = grads
    grad_projected_ptr, partial_ptr = scratch
    p, mask_p = rows(positions, settings)
    # the sums over the positions of this program: the gradients of W, then of the static maps and of the scale
    partial_ptr += tl.program_id(0).to(tl.int64) * width
    partial_static_ptr = partial_ptr + d * (n + 2)
    grad_pre = pre_gradient(grad_read_ptr, new_ptr, p, mask_p, d, settings)

    # the maps, and the projection: the gradient of rms(x) is parallel to x
    s_pre_res, s_post = tl.load(scale_ptr).to(tl.float32), tl.load(scale_ptr + 1).to(tl.float32)
    grad_pre_res, grad_post = tl.zeros(p.shape, tl.float32), tl.zeros(p.shape, tl.float32)
    grad_read_maps = grad_pre + load_vectors(grad_post_ptr, p, mask_p, n) + load_vectors(grad_res_ptr, p, mask_p, n * n)
    along, grad_projected = (), ()
    for j in tl.static_range(n):
        projected = load_vectors(projected_ptr, p * n + j, mask_p, n + 2)
        inverse_rms = tl.load(inverse_rms_ptr + p * n + j, mask_p, other=0.0)
        along_j = tl.zeros(p.shape, tl.float32)
        for k in tl.static_range(n + 2):
            m, grad_map = tanh(projected[k]), grad_read_maps[k * n + j]
            tl.store(partial_static_ptr + k * n + j, tl.sum(grad_map, axis=0))
            if k == 1:
                grad_post += grad_map * m
                grad_map *= s_post
            else:
                grad_pre_res += grad_map * m
                grad_map *= s_pre_res
            grad_map *= (1 - m * m) * inverse_rms
            along_j -= grad_map * projected[k]
            tl.store(grad_projected_ptr + (p * n + j) * (n + 2) + k, grad_map, mask_p)
            grad_projected += (grad_map,)
        along += (along_j * inverse_rms / d,)
    tl.store(partial_static_ptr + n * (n + 2), tl.sum(grad_pre_res, axis=0))
    tl.store(partial_static_ptr + n * (n + 2) + 1, tl.sum(grad_post, axis=0))
    # the values that follow were written by other threads
    tl.debug_barrier()
    c = tl.arange(0, 16)
    low = ()
    for j in tl.static_range(n):
        at = ((p * n + j) * (n + 2))[None, :] + c[:, None]
        low += (load_fp32(grad_projected_ptr, at, (c < n + 2)[:, None] & mask_p[None, :]).to(settings.dtype),)

    # the streams
    pre = load_vectors(pre_ptr, p, mask_p, n)
    if PENDING:
        maps, grad_maps = load_maps(sources, p, mask_p, settings), zeros(p.shape, n + n * n)
    last = (d - 1) // settings.columns * settings.columns
    for back in range(0, d, settings.columns):
        column, mask_c, at_x, at_y, mask = tile(p, mask_p, last - back, d, settings)
        grad_read = load_fp32(grad_read_ptr, at_y, mask)
        grad_w = tl.zeros([16, settings.columns], tl.float32)
        w = ()
        for k in tl.static_range(n + 2):
            w += (load_fp32(w_ptr + k * d, column, mask_c),)
        tiles = ()
        for i in tl.static_range(n):
            new = tl.load(new_ptr + at_x + i * d, mask, other=0.0)
            grad_w = tl.dot(low[i], new.to(settings.dtype), grad_w, input_precision="ieee")
            grad = pre[i][:, None] * grad_read + along[i][:, None] * new.to(tl.float32)
            if PENDING:
                grad += load_fp32(grad_new_ptr + at_x, i * d, mask)
            for k in tl.static_range(n + 2):
                grad += grad_projected[i * (n + 2) + k][:, None] * w[k][None, :]
            if PENDING:
                tiles += (grad,)
            else:
                store_as(grad_sources[0] + at_x, i * d, grad, mask)
        tl.store(partial_ptr + c[:, None] * d + column[None, :], grad_w, (c < n + 2)[:, None] & mask_c[None, :])
        if PENDING:
            grad_maps = write_backward(tiles, grad_maps, maps, sources, grad_sources, at_x, at_y, mask, d, settings)
    if PENDING:
        store_grad_maps(grad_sources, grad_maps, p, mask_p, settings)


@triton.jit
def tanh(x):
    """Return tanh(x), with an absolute error of about 1e-7."""
    return 2 * tl.sigmoid(2 * x) - 1
