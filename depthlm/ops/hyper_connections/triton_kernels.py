# mypy: allow-untyped-defs, disable-error-code="assignment"
"""The Triton kernels of `hyper_post_pre`.

A program processes BP positions, in chunks of BD columns of d. The second pass over the columns goes backwards, because
the columns that were loaded last are still in the cache. Maps, and all numbers per position, are tuples of vectors over
positions.

Shapes: p positions (batch and tokens), n streams (i new, j old), d hidden size, c columns of the projection of a
stream: n + 2, padded to the 16 that `tl.dot` requires.
"""

from depthlm.ops.mhc.triton_streams import (
    mixed_tile,
    store_transposed,
    store_vectors,
    stream_tiles,
    vectors,
    write_backward,
    zeros,
)
from depthlm.ops.triton_common import tl, triton


@triton.jit
def forward_kernel(
    x_ptr, output_ptr, post_in_ptr, res_in_ptr, w_ptr, scale_ptr, static_pre_ptr, static_post_ptr, static_res_ptr,
    read_ptr, new_ptr, post_ptr, res_ptr, pre_ptr, projected_ptr, rms_ptr, positions, d,
    EPS: tl.constexpr, N: tl.constexpr, PENDING: tl.constexpr, NARROW: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = p < positions
    c = tl.arange(0, 16)
    if PENDING:
        post_in = vectors(post_in_ptr, p * N, inside, N)
        res_in = vectors(res_in_ptr, p * N * N, inside, N * N)
        projected_y = tl.zeros([BP, 16], tl.float32)
    projected, squares = (), zeros(BP, N)
    for _ in tl.static_range(N):
        projected += (tl.zeros([BP, 16], tl.float32),)
    for start in range(0, d, BD):
        column = start + tl.arange(0, BD)
        mask = inside[:, None] & (column < d)[None, :]
        tile = (p * N * d)[:, None] + column[None, :]
        at_w = column[:, None] + c[None, :] * d
        w = tl.load(w_ptr + at_w, (column < d)[:, None] & (c < N + 2)[None, :], other=0.0).to(NARROW)
        old = stream_tiles(x_ptr, tile, mask, d, N)
        if PENDING:
            y = tl.load(output_ptr + (p * d)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
            projected_y = tl.dot(y.to(NARROW), w, projected_y, input_precision="ieee")
        added, added_squares = (), ()
        for i in tl.static_range(N):
            added += (tl.dot(old[i].to(NARROW), w, projected[i], input_precision="ieee"),)
            new = old[i]
            if PENDING:
                rounded = mixed_tile(i, old, y, post_in, res_in, N).to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + tile + i * d, rounded, mask)
                new = rounded.to(tl.float32)
            added_squares += (squares[i] + tl.sum(new * new, axis=1),)
        projected, squares = added, added_squares

    if PENDING:
        # again, since registers are scarce in the loop, and the projections have another layout
        post_in = vectors(post_in_ptr, p * N, inside, N)
        res_in = vectors(res_in_ptr, p * N * N, inside, N * N)
    for j in tl.static_range(N):
        rms = tl.rsqrt(squares[j] / d + EPS)
        tl.store(rms_ptr + p * N + j, rms, inside)
        if PENDING:
            # W x'_i = sum_j res[i, j] W x_j + post[i] W y: the factors of the products are loaded tiles, since Triton
            # would compute x'_i once more in the layout of a factor, in every warp
            scaled = mixed_tile(j, projected, projected_y, post_in, res_in, N)
        else:
            scaled = projected[j]
        at = ((p * N + j) * (N + 2))[:, None] + c[None, :]
        tl.store(projected_ptr + at, scaled * rms[:, None], inside[:, None] & (c < N + 2)[None, :])
    # the values that follow were written by other threads
    tl.debug_barrier()
    s_pre_res, s_post = tl.load(scale_ptr).to(tl.float32), tl.load(scale_ptr + 1).to(tl.float32)
    pre = ()
    for j in tl.static_range(N):
        m = vectors(projected_ptr, (p * N + j) * (N + 2), inside, N + 2)
        pre += (tl.load(static_pre_ptr + j).to(tl.float32) + s_pre_res * tanh(m[0]),)
        tl.store(pre_ptr + p * N + j, pre[j], inside)
        post = tl.load(static_post_ptr + j).to(tl.float32) + s_post * tanh(m[1])
        tl.store(post_ptr + p * N + j, post, inside)
        for i in tl.static_range(N):
            res = tl.load(static_res_ptr + i * N + j).to(tl.float32) + s_pre_res * tanh(m[2 + i])
            tl.store(res_ptr + p * N * N + i * N + j, res, inside)
    source_ptr = new_ptr if PENDING else x_ptr
    last = (d - 1) // BD * BD
    for back in range(0, d, BD):
        column = last - back + tl.arange(0, BD)
        mask = inside[:, None] & (column < d)[None, :]
        news = stream_tiles(source_ptr, (p * N * d)[:, None] + column[None, :], mask, d, N)
        read = tl.zeros([BP, BD], tl.float32)
        for i in tl.static_range(N):
            read += pre[i][:, None] * news[i]
        tl.store(read_ptr + (p * d)[:, None] + column[None, :], read.to(read_ptr.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    grad_read_ptr, grad_new_ptr, grad_post_ptr, grad_res_ptr, x_ptr, output_ptr, post_in_ptr, res_in_ptr,
    new_ptr, w_ptr, scale_ptr, pre_ptr, projected_ptr, rms_ptr,
    grad_x_ptr, grad_output_ptr, grad_post_in_ptr, grad_res_in_ptr, grad_projected_ptr, partial_ptr,
    positions, d, width,
    N: tl.constexpr, PENDING: tl.constexpr, NARROW: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = p < positions
    # the sums over the positions of this program: the gradients of W, then of the static maps and of the scale
    partial_ptr += tl.program_id(0).to(tl.int64) * width
    of_static_ptr = partial_ptr + (N + 2) * d

    # d H_pre
    grad_pre = zeros(BP, N)
    for start in range(0, d, BD):
        column = start + tl.arange(0, BD)
        mask = inside[:, None] & (column < d)[None, :]
        grad_read = tl.load(grad_read_ptr + (p * d)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
        news = stream_tiles(new_ptr, (p * N * d)[:, None] + column[None, :], mask, d, N)
        added = ()
        for i in tl.static_range(N):
            added += (grad_pre[i] + tl.sum(grad_read * news[i], axis=1),)
        grad_pre = added

    # the maps, and the projection: the gradient of rms(x) is parallel to x
    s_pre_res, s_post = tl.load(scale_ptr).to(tl.float32), tl.load(scale_ptr + 1).to(tl.float32)
    of_pre_res, of_post = tl.zeros([BP], tl.float32), tl.zeros([BP], tl.float32)
    grad_maps = grad_pre + vectors(grad_post_ptr, p * N, inside, N) + vectors(grad_res_ptr, p * N * N, inside, N * N)
    along, grad_projected = (), ()
    for j in tl.static_range(N):
        projected = vectors(projected_ptr, (p * N + j) * (N + 2), inside, N + 2)
        rms = tl.load(rms_ptr + p * N + j, inside, other=0.0)
        along_j = tl.zeros([BP], tl.float32)
        for k in tl.static_range(N + 2):
            m, grad_map = tanh(projected[k]), grad_maps[k * N + j]
            tl.store(of_static_ptr + k * N + j, tl.sum(grad_map, axis=0))
            if k == 1:
                of_post += grad_map * m
                grad_map *= s_post
            else:
                of_pre_res += grad_map * m
                grad_map *= s_pre_res
            grad_map *= (1 - m * m) * rms
            along_j -= grad_map * projected[k]
            tl.store(grad_projected_ptr + (p * N + j) * (N + 2) + k, grad_map, inside)
            grad_projected += (grad_map,)
        along += (along_j * rms / d,)
    tl.store(of_static_ptr + N * (N + 2), tl.sum(of_pre_res, axis=0))
    tl.store(of_static_ptr + N * (N + 2) + 1, tl.sum(of_post, axis=0))
    # the values that follow were written by other threads
    tl.debug_barrier()
    c = tl.arange(0, 16)
    low = ()
    for j in tl.static_range(N):
        at = ((p * N + j) * (N + 2))[None, :] + c[:, None]
        low += (tl.load(grad_projected_ptr + at, (c < N + 2)[:, None] & inside[None, :], other=0.0).to(NARROW),)

    # the streams
    pre = vectors(pre_ptr, p * N, inside, N)
    if PENDING:
        post_in = vectors(post_in_ptr, p * N, inside, N)
        res_in = vectors(res_in_ptr, p * N * N, inside, N * N)
        grad_post, grad_res = zeros(BP, N), zeros(BP, N * N)
    last = (d - 1) // BD * BD
    for back in range(0, d, BD):
        column = last - back + tl.arange(0, BD)
        seen = (column < d)[None, :]
        mask = inside[:, None] & seen
        tile = (p * N * d)[:, None] + column[None, :]
        flat = (p * d)[:, None] + column[None, :]
        grad_read = tl.load(grad_read_ptr + flat, mask, other=0.0).to(tl.float32)
        grad_w = tl.zeros([16, BD], tl.float32)
        w = ()
        for k in tl.static_range(N + 2):
            w += (tl.load(w_ptr + k * d + column, column < d, other=0.0).to(tl.float32),)
        grads = ()
        for i in tl.static_range(N):
            new = tl.load(new_ptr + tile + i * d, mask, other=0.0)
            grad_w = tl.dot(low[i], new.to(NARROW), grad_w, input_precision="ieee")
            grad = pre[i][:, None] * grad_read + along[i][:, None] * new.to(tl.float32)
            if PENDING:
                grad += tl.load(grad_new_ptr + tile + i * d, mask, other=0.0).to(tl.float32)
            for k in tl.static_range(N + 2):
                grad += grad_projected[i * (N + 2) + k][:, None] * w[k][None, :]
            if PENDING:
                grads += (grad,)
            else:
                tl.store(grad_x_ptr + tile + i * d, grad.to(grad_x_ptr.dtype.element_ty), mask)
        tl.store(partial_ptr + c[:, None] * d + column[None, :], grad_w, (c < N + 2)[:, None] & seen)
        if PENDING:
            grad_post, grad_res = write_backward(
                grads, grad_post, grad_res, x_ptr, output_ptr, post_in, res_in, grad_x_ptr, grad_output_ptr,
                tile, flat, mask, d, N,
            )  # fmt: skip
    if PENDING:
        store_vectors(grad_post_in_ptr, p * N, inside, grad_post)
        store_transposed(grad_res_in_ptr, p, inside, grad_res, N)


@triton.jit
def tanh(x):
    """Return tanh(x), with an absolute error of about 1e-7."""
    return 2 * tl.sigmoid(2 * x) - 1
