# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`hyper_post_pre` in Triton. The first pass writes and projects the new streams, the second one reads them.

The projections are sums of products in fp32 rather than matrix products: a stream has only n + 2 of them, so a tile
would take longer through shared memory to tensor cores than the multiplications take.

Shapes: b batch, t tokens, p positions (batch and tokens), n streams, i new stream, j old stream, d hidden size,
k columns of the projection of a stream, n + 2.
"""

import torch
from torch import Tensor

from depthlm.ops.dtypes import no_autocast
from depthlm.ops.hyper_connections.cpu import Dynamic, Static
from depthlm.ops.hyper_connections.cpu import hyper_post_pre as static_post_pre
from depthlm.ops.library import register
from depthlm.ops.mhc.cpu import Pending, Result
from depthlm.ops.mhc.triton_reads import pre_gradient, read_streams
from depthlm.ops.mhc.triton_streams import (
    Tensors,
    add_columns,
    align_words,
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

# positions of a program, by the predicted times
POSITIONS = tiles_of("hyper_connections")["POSITIONS"]


def hyper_post_pre(
    x_btnd: Tensor, pending: Pending | None, static: Static, dynamic: Dynamic | None, eps: float, rebuild: bool = False
) -> Result:
    """Run `depthlm.ops.hyper_connections.naive.hyper_post_pre` in Triton."""
    if dynamic is None:
        return static_post_pre(x_btnd, pending, static, None, eps, rebuild)
    (n, d), (pre_n, post_n, res_ij), (w_md, scale) = x_btnd.shape[2:], static, dynamic
    shapes = {"static_pre": (pre_n, (n,)), "static_post": (post_n, (n,)), "static_res": (res_ij, (n, n))}
    check_streams("hyper_connections", x_btnd, pending, w=(w_md, (n + 2, d)), scale=(scale, (2,)), **shapes)
    return write_and_read((forward, backward), x_btnd, pending, [w_md, *static, scale], (eps,), rebuild)


def _outputs(sources, parameters, eps):
    b, t, n, _ = sources[0].shape
    return empty_outputs(sources, [b, t, n], [b, t, n, n + 2], [b, t, n])


def _gradients(grads, sources, new, parameters, kept, eps):
    w, *others = parameters
    count = sum(parameter.numel() for parameter in others)
    return [*map(torch.empty_like, [*sources, w]), kept[0].new_empty(count)]


@register("hyper_post_pre", _outputs)
def forward(sources: Tensors, parameters: Tensors, eps: float) -> Tensors:
    """Return input_btd, X'_btnd, post_btn, res_btij, pre_btn, and W x and 1 / rms of each stream."""
    outputs, (w, *others) = _outputs(sources, parameters, eps), parameters
    launch(
        hyper_connections_forward, sources, [align_words(w), *others], outputs, settings_of(sources[0], eps, POSITIONS)
    )
    return outputs


@register("hyper_post_pre_backward", _gradients)
def backward(grads: Tensors, sources: Tensors, new: Tensor, parameters: Tensors, kept: Tensors, eps: float) -> Tensors:
    """Return the gradients of the sources and of W, and those of the other parameters in one tensor."""
    (b, t, n, d), (pre, projected, _), (w, *others, scale) = new.shape, kept, parameters
    settings = settings_of(new, eps, POSITIONS)
    grad_sources = [torch.empty_like(x) for x in sources]
    grad_projected = torch.empty_like(projected, dtype=new.dtype)
    count = sum(parameter.numel() for parameter in (*others, scale))
    partial_sums = pre.new_empty(cdiv(b * t, settings.positions.value), count)
    tensors = new, [align_words(w), scale], kept, grads, grad_sources, [grad_projected, partial_sums]
    launch(hyper_connections_backward, sources, *tensors, settings)
    with no_autocast(new):
        # in the dtype of the streams: a copy of them in another one would move more bytes than the product
        grad_w = (grad_projected.view(b * t * n, n + 2).mT @ new.view(b * t * n, d)).to(w.dtype)
    return [*grad_sources, grad_w, partial_sums.sum(0)]


@triton.jit
def hyper_connections_forward(sources, parameters, outputs, positions, d: tl.constexpr, settings):
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    w_ptr, static_pre_ptr, static_post_ptr, static_res_ptr, scale_ptr = parameters
    read_ptr, new_ptr, post_ptr, res_ptr, pre_ptr, projected_ptr, inverse_rms_ptr = outputs
    p, mask_p = rows(positions, settings)
    projected = zeros([settings.positions, settings.lanes], n * (n + 2))
    squares = zeros([settings.positions, settings.lanes], n)
    for start in range(0, d, settings.columns):
        at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        if PENDING:
            y, old = load_pending(sources, at_x, at_y, mask, d, settings)
        w, sums, sums_of_squares = (), (), ()
        for k in tl.static_range(n + 2):
            w += (load_shared(w_ptr, k, start, d, settings),)
        for i in tl.static_range(n):
            if PENDING:
                mixed = mixed_tile(sources, i, p, mask_p, at_x, mask, y, old, d, settings)
                stored = mixed.to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + at_x + i * d, stored, mask)
            else:
                stored = tl.load(sources[0] + at_x + i * d, mask, other=0.0)
            new = stored.to(tl.float32)
            sums_of_squares += (add_columns(squares[i], new * new),)
            for k in tl.static_range(n + 2):
                sums += (add_columns(projected[i * (n + 2) + k], new * w[k]),)
        projected, squares = sums, sums_of_squares

    for j in tl.static_range(n):
        inverse_rms = tl.rsqrt(tl.sum(squares[j], axis=1) / d + settings.eps)
        tl.store(inverse_rms_ptr + p * n + j, inverse_rms, mask_p)
        for k in tl.static_range(n + 2):
            total = tl.sum(projected[j * (n + 2) + k], axis=1)
            tl.store(projected_ptr + p * n * (n + 2) + j * (n + 2) + k, total, mask_p)
    # the values that follow were written by other threads
    tl.debug_barrier()
    j, k, mask_pjk = _cells(mask_p, settings)
    scaled, _ = _load_projected(projected_ptr, inverse_rms_ptr, p, j, k, mask_pjk, settings)
    maps = _scales(scale_ptr, k) * tanh(scaled) + load_fp32(static_pre_ptr, j, (j < n) & (k == 0))
    maps += load_fp32(static_post_ptr, j, (j < n) & (k == 1))
    maps += load_fp32(static_res_ptr, (k - 2) * n + j, (j < n) & (k >= 2) & (k < n + 2))
    at = (p * n)[:, None, None]
    tl.store(pre_ptr + at + j, maps, mask_pjk & (k == 0))
    tl.store(post_ptr + at + j, maps, mask_pjk & (k == 1))
    tl.store(res_ptr + at * n + (k - 2) * n + j, maps, mask_pjk & (k >= 2))
    tl.debug_barrier()
    pre = load_vectors(pre_ptr, p, mask_p, n)
    read_streams(read_ptr, new_ptr if PENDING else sources[0], pre, p, mask_p, d, settings)


@triton.jit
def hyper_connections_backward(
    sources, new_ptr, parameters, kept, grads, grad_sources, scratch, positions, d: tl.constexpr, settings
):
    PENDING: tl.constexpr = len(sources) > 1
    n: tl.constexpr = settings.n
    w_ptr, scale_ptr = parameters
    pre_ptr, projected_ptr, inverse_rms_ptr = kept
    grad_read_ptr, grad_new_ptr, grad_post_ptr, grad_res_ptr = grads
    grad_projected_ptr, partial_ptr = scratch
    p, mask_p = rows(positions, settings)
    # the sums over the positions of this program: the gradients of the static maps, then of the scale
    partial_ptr += tl.program_id(0).to(tl.int64) * (n * (n + 2) + 2)
    grad_pre = pre_gradient(grad_read_ptr, new_ptr, p, mask_p, d, settings)

    # the maps, and the projection: the gradient of rms(x) is parallel to x
    j, k, mask_pjk = _cells(mask_p, settings)
    at = (p * n)[:, None, None]
    grad_maps_pjk = load_fp32(grad_post_ptr + at, j, mask_pjk & (k == 1))
    grad_maps_pjk += load_fp32(grad_res_ptr + at * n, (k - 2) * n + j, mask_pjk & (k >= 2))
    for i in tl.static_range(n):
        grad_maps_pjk += tl.where((j == i) & (k == 0), grad_pre[i][:, None, None], 0.0)
    tl.store(partial_ptr + k * n + j, tl.sum(grad_maps_pjk, axis=0)[None, :, :], (j < n) & (k < n + 2))
    projected, inverse_rms = _load_projected(projected_ptr, inverse_rms_ptr, p, j, k, mask_pjk, settings)
    dynamic = tanh(projected)
    grad_scale = tl.sum(rounded(grad_maps_pjk * dynamic), axis=0)[None, :, :]
    tl.store(partial_ptr + n * (n + 2), tl.sum(tl.sum(tl.sum(tl.where(k == 1, 0.0, grad_scale), 2), 1), 0))
    tl.store(partial_ptr + n * (n + 2) + 1, tl.sum(tl.sum(tl.sum(tl.where(k == 1, grad_scale, 0.0), 2), 1), 0))
    grad_pjk = grad_maps_pjk * _scales(scale_ptr, k) * (1 - dynamic * dynamic) * inverse_rms
    store_as(grad_projected_ptr + at * (n + 2), j * (n + 2) + k, grad_pjk, mask_pjk)
    along_pj = tl.sum(rounded(-grad_pjk * projected * inverse_rms), axis=2) / d
    along = ()
    for i in tl.static_range(n):
        along += (tl.sum(tl.where(tl.arange(0, settings.padded_n)[None, :] == i, along_pj, 0.0), axis=1),)
    # the values that follow were written by other threads
    tl.debug_barrier()

    # the streams
    pre = load_vectors(pre_ptr, p, mask_p, n)
    grad_projected = load_vectors(grad_projected_ptr, p, mask_p, n * (n + 2))
    if PENDING:
        maps = load_maps(sources, p, mask_p, settings)
        grad_maps = zeros([settings.positions, settings.lanes], n + n * n)
    last = (d - 1) // settings.columns * settings.columns
    for back in range(0, d, settings.columns):
        # backwards, because the columns that were loaded last are still in the cache
        at_x, at_y, mask = tile(p, mask_p, last - back, d, settings)
        grad_read = load_fp32(grad_read_ptr, at_y, mask)
        tiles = ()
        for i in tl.static_range(n):
            grad = pre[i][:, None] * grad_read + along[i][:, None] * load_fp32(new_ptr + at_x, i * d, mask)
            if PENDING:
                grad += load_fp32(grad_new_ptr + at_x, i * d, mask)
            for c in tl.static_range(n + 2):
                grad += grad_projected[i * (n + 2) + c][:, None] * load_shared(w_ptr, c, last - back, d, settings)
            if PENDING:
                tiles += (grad,)
            else:
                store_as(grad_sources[0] + at_x, i * d, grad, mask)
        if PENDING:
            grad_maps = write_backward(tiles, grad_maps, maps, sources, grad_sources, at_x, at_y, mask, d, settings)
    if PENDING:
        store_grad_maps(grad_sources, grad_maps, p, mask_p, settings)


@triton.jit
def _cells(mask_p, settings):
    """Return the streams j and columns k of the projections [p, j, k], and the mask of those that are not padding."""
    j, k = tl.arange(0, settings.padded_n)[None, :, None], tl.arange(0, 2 * settings.padded_n)[None, None, :]
    j, k = tl.broadcast(j, k)
    return j, k, mask_p[:, None, None] & (j < settings.n) & (k < settings.n + 2)


@triton.jit
def _load_projected(projected_ptr, inverse_rms_ptr, p, j, k, mask, settings):
    """Load the projections of the streams divided by their rms, and 1 / rms."""
    at = (p * settings.n)[:, None, None]
    inverse_rms = load_fp32(inverse_rms_ptr + at, j, mask)
    projected = load_fp32(projected_ptr + at * (settings.n + 2), j * (settings.n + 2) + k, mask)
    return projected * inverse_rms, inverse_rms


@triton.jit
def _scales(scale_ptr, k):
    """Return the scale of each column: H_pre has column 0, H_post has column 1, and H_res those after."""
    return tl.where(k == 1, tl.load(scale_ptr + 1).to(tl.float32), tl.load(scale_ptr).to(tl.float32))


@triton.jit
def tanh(x):
    """Return tanh(x), with an absolute error of about 1e-7."""
    return 2 * tl.sigmoid(2 * x) - 1
