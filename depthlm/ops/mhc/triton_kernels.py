# mypy: allow-untyped-defs, disable-error-code="assignment"
"""The Triton kernels of `mhc_post_pre`.

A program processes BP positions, in chunks of BD columns of d.

Shapes: p positions (batch and tokens), n streams (i new, j old), d hidden size, m = n (n + 2).
"""

from depthlm.ops.mhc.triton_maps import cells, columns, load, logits_and_gates, sinkhorn, sinkhorn_backward
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
    x_ptr, output_ptr, post_in_ptr, res_in_ptr, phi_ptr, alpha_ptr, bias_ptr,
    read_ptr, new_ptr, post_ptr, res_ptr, projected_ptr, scale_ptr, positions, d, iterations,
    EPS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, PENDING: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = p < positions
    at_r, held_r, at_g, held_g = columns(N, NP)
    if PENDING:
        post_in = vectors(post_in_ptr, p * N, inside, N)
        res_in = vectors(res_in_ptr, p * N * N, inside, N * N)
    projected_r = tl.zeros([BP, NP * NP], tl.float32)
    projected_g = tl.zeros([BP, 16], tl.float32)
    squares = tl.zeros([BP], tl.float32)
    for start in range(0, d, BD):
        column = start + tl.arange(0, BD)
        mask = inside[:, None] & (column < d)[None, :]
        tile = (p * N * d)[:, None] + column[None, :]
        if PENDING:
            y = tl.load(output_ptr + (p * d)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
            old = stream_tiles(x_ptr, tile, mask, d, N)
        for i in tl.static_range(N):
            if PENDING:
                new = mixed_tile(i, old, y, post_in, res_in, N).to(new_ptr.dtype.element_ty)
                tl.store(new_ptr + tile + i * d, new, mask)
            else:
                new = tl.load(x_ptr + tile + i * d, mask, other=0.0)
            squares += tl.sum(new.to(tl.float32) * new.to(tl.float32), axis=1)
            low = new.to(phi_ptr.dtype.element_ty)
            phi = phi_ptr + i * d + column[:, None]
            seen = (column < d)[:, None]
            phi_r = tl.load(phi + at_r[None, :] * (N * d), seen & held_r[None, :], other=0.0)
            phi_g = tl.load(phi + at_g[None, :] * (N * d), seen & held_g[None, :], other=0.0)
            projected_r = tl.dot(low, phi_r, projected_r, input_precision="ieee")
            projected_g = tl.dot(low, phi_g, projected_g, input_precision="ieee")
    scale = tl.rsqrt(squares / (N * d) + EPS)
    projected_r, projected_g = projected_r * scale[:, None], projected_g * scale[:, None]
    M: tl.constexpr = N * (N + 2)
    tl.store(scale_ptr + p, scale, inside)
    tl.store(projected_ptr + (p * M)[:, None] + at_r[None, :], projected_r, inside[:, None] & held_r[None, :])
    tl.store(projected_ptr + (p * M)[:, None] + at_g[None, :], projected_g, inside[:, None] & held_g[None, :])

    logits, gates = logits_and_gates(projected_r, projected_g, alpha_ptr, bias_ptr, N, NP)
    valid, at_ij = cells(N, NP)
    m = sinkhorn(tl.reshape(logits, (BP, NP, NP)), valid, iterations)
    tl.store(res_ptr + (p * N * N)[:, None, None] + at_ij, m, inside[:, None, None] & valid)
    g = tl.arange(0, 16)
    is_post = inside[:, None] & (held_g & (g >= NP))[None, :]
    tl.store(post_ptr + (p * N)[:, None] + (g - NP)[None, :], 2 * gates, is_post)

    pre = ()
    for i in tl.static_range(N):
        pre += (tl.sum(tl.where(g[None, :] == i, gates, 0.0), axis=1),)
    # the values that follow were written by other threads
    tl.debug_barrier()
    source_ptr = new_ptr if PENDING else x_ptr
    for start in range(0, d, BD):
        column = start + tl.arange(0, BD)
        mask = inside[:, None] & (column < d)[None, :]
        read = tl.zeros([BP, BD], tl.float32)
        for i in tl.static_range(N):
            at = (p * N * d)[:, None] + column[None, :] + i * d
            read += pre[i][:, None] * tl.load(source_ptr + at, mask, other=0.0).to(tl.float32)
        tl.store(read_ptr + (p * d)[:, None] + column[None, :], read.to(read_ptr.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    grad_read_ptr, grad_new_ptr, grad_post_ptr, grad_res_ptr, x_ptr, output_ptr, post_in_ptr, res_in_ptr,
    new_ptr, phi_ptr, alpha_ptr, bias_ptr, projected_ptr, scale_ptr,
    sums_ptr, grad_x_ptr, grad_output_ptr, grad_post_in_ptr, grad_res_in_ptr, grad_projected_ptr, partial_ptr,
    positions, d, iterations,
    N: tl.constexpr, NP: tl.constexpr, PENDING: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = p < positions
    at_r, held_r, at_g, held_g = columns(N, NP)
    g = tl.arange(0, 16)

    # d H_pre
    grad_pre = zeros(BP, N)
    for start in range(0, d, BD):
        column = start + tl.arange(0, BD)
        mask = inside[:, None] & (column < d)[None, :]
        grad_read = tl.load(grad_read_ptr + (p * d)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
        added = ()
        for i in tl.static_range(N):
            new = tl.load(new_ptr + (p * N * d)[:, None] + column[None, :] + i * d, mask, other=0.0).to(tl.float32)
            added += (grad_pre[i] + tl.sum(grad_read * new, axis=1),)
        grad_pre = added

    # the maps
    M: tl.constexpr = N * (N + 2)
    projected_r = load(projected_ptr, p * M, inside, at_r, held_r)
    projected_g = load(projected_ptr, p * M, inside, at_g, held_g)
    logits, gates = logits_and_gates(projected_r, projected_g, alpha_ptr, bias_ptr, N, NP)
    is_post = held_g & (g >= NP)
    grad_gates = 2 * load(grad_post_ptr, p * N, inside, g - NP, is_post)
    for i in tl.static_range(N):
        grad_gates = tl.where(g[None, :] == i, grad_pre[i][:, None], grad_gates)
    grad_g = grad_gates * gates * (1 - gates)
    grad_r = tl.reshape(
        sinkhorn_backward(tl.reshape(logits, (BP, NP, NP)), grad_res_ptr, sums_ptr, p, inside, iterations, N, NP),
        (BP, NP * NP),
    )
    # the sums over the positions of this program: the gradients of the bias, then of alpha
    to_ptr = partial_ptr + tl.program_id(0) * (M + 3)
    tl.store(to_ptr + at_r, tl.sum(grad_r, axis=0), held_r)
    tl.store(to_ptr + at_g, tl.sum(grad_g, axis=0), held_g)
    of_alpha = tl.sum(grad_g * projected_g, axis=0)
    tl.store(to_ptr + M, tl.sum(tl.where(g < NP, of_alpha, 0.0), axis=0))
    tl.store(to_ptr + M + 1, tl.sum(tl.where(g < NP, 0.0, of_alpha), axis=0))
    tl.store(to_ptr + M + 2, tl.sum(tl.sum(grad_r * projected_r, axis=1), axis=0))

    # the projection: the gradient of rms(X') is parallel to X'
    scale = tl.load(scale_ptr + p, inside, other=0.0)
    grad_r = grad_r * tl.load(alpha_ptr + 2).to(tl.float32)
    grad_g = grad_g * tl.load(alpha_ptr + at_g // N, held_g, other=0.0).to(tl.float32)[None, :]
    along = tl.sum(grad_r * projected_r, axis=1) + tl.sum(grad_g * projected_g, axis=1)
    along = -along * scale * scale / (N * d)
    grad_r, grad_g = grad_r * scale[:, None], grad_g * scale[:, None]
    to_ptr = grad_projected_ptr + (p * M)[:, None]
    tl.store(to_ptr + at_r[None, :], grad_r.to(grad_projected_ptr.dtype.element_ty), inside[:, None] & held_r[None, :])
    tl.store(to_ptr + at_g[None, :], grad_g.to(grad_projected_ptr.dtype.element_ty), inside[:, None] & held_g[None, :])
    low_r, low_g = grad_r.to(phi_ptr.dtype.element_ty), grad_g.to(phi_ptr.dtype.element_ty)
    pre = ()
    for i in tl.static_range(N):
        pre += (tl.sum(tl.where(g[None, :] == i, gates, 0.0), axis=1),)

    # the streams
    if PENDING:
        post_in = vectors(post_in_ptr, p * N, inside, N)
        res_in = vectors(res_in_ptr, p * N * N, inside, N * N)
        grad_post, grad_res = zeros(BP, N), zeros(BP, N * N)
    for start in range(0, d, BD):
        column = start + tl.arange(0, BD)
        seen = (column < d)[None, :]
        mask = inside[:, None] & seen
        tile = (p * N * d)[:, None] + column[None, :]
        flat = (p * d)[:, None] + column[None, :]
        grad_read = tl.load(grad_read_ptr + flat, mask, other=0.0).to(tl.float32)
        grads = ()
        for i in tl.static_range(N):
            new = tl.load(new_ptr + tile + i * d, mask, other=0.0).to(tl.float32)
            grad = pre[i][:, None] * grad_read + along[:, None] * new
            if PENDING:
                grad += tl.load(grad_new_ptr + tile + i * d, mask, other=0.0).to(tl.float32)
            phi = phi_ptr + i * d + column[None, :]
            phi_r = tl.load(phi + at_r[:, None] * (N * d), held_r[:, None] & seen, other=0.0)
            phi_g = tl.load(phi + at_g[:, None] * (N * d), held_g[:, None] & seen, other=0.0)
            grad = tl.dot(low_r, phi_r, grad, input_precision="ieee")
            grad = tl.dot(low_g, phi_g, grad, input_precision="ieee")
            if PENDING:
                grads += (grad,)
            else:
                tl.store(grad_x_ptr + tile + i * d, grad.to(grad_x_ptr.dtype.element_ty), mask)
        if PENDING:
            grad_post, grad_res = write_backward(
                grads, grad_post, grad_res, x_ptr, output_ptr, post_in, res_in, grad_x_ptr, grad_output_ptr,
                tile, flat, mask, d, N,
            )  # fmt: skip
    if PENDING:
        store_vectors(grad_post_in_ptr, p * N, inside, grad_post)
        store_transposed(grad_res_in_ptr, p, inside, grad_res, N)
