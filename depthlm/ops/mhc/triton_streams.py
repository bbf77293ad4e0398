# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Triton functions of a pending write, X' = H_res X + H_post^T y, shared by `mhc_post_pre` and `hyper_post_pre`.

A matrix per position is a tuple of vectors over positions, row by row.

Shapes: p positions (batch and tokens), n streams (i new, j old), d hidden size.
"""

from depthlm.ops.triton_common import tl, triton


@triton.jit
def vectors(ptr, at_p, inside_p, COUNT: tl.constexpr):
    """Load COUNT consecutive numbers per position, as COUNT vectors over positions in fp32."""
    loaded = ()
    for c in tl.static_range(COUNT):
        loaded += (tl.load(ptr + at_p + c, inside_p, other=0.0).to(tl.float32),)
    return loaded


@triton.jit
def store_vectors(ptr, at_p, inside_p, values):
    """Store a tuple of vectors over positions as consecutive numbers per position."""
    for c in tl.static_range(len(values)):
        tl.store(ptr + at_p + c, values[c].to(ptr.dtype.element_ty), inside_p)


@triton.jit
def zeros(BP: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT vectors over positions."""
    made = ()
    for _ in tl.static_range(COUNT):
        made += (tl.zeros([BP], tl.float32),)
    return made


@triton.jit
def stream_tiles(x_ptr, tile, mask, d, N: tl.constexpr):
    """Load a tile [p, columns] of each stream in fp32. tile: offsets of the first stream."""
    tiles = ()
    for j in tl.static_range(N):
        tiles += (tl.load(x_ptr + tile + j * d, mask, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def mixed_tile(i: tl.constexpr, old, y, post, res, N: tl.constexpr):
    """Return the tile of new stream i in fp32."""
    mixed = post[i][:, None] * y
    for j in tl.static_range(N):
        mixed += res[i * N + j][:, None] * old[j]
    return mixed


@triton.jit
def write_backward(
    grads, grad_post, grad_res, x_ptr, output_ptr, post, res, grad_x_ptr, grad_output_ptr, tile, flat, mask, d,
    N: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the tiles of X and y, and return grad_post and grad_res with the sums of these columns.

    grads: the gradients of the new streams. flat: offsets of y.
    """
    y = tl.load(output_ptr + flat, mask, other=0.0).to(tl.float32)
    grad_output = tl.zeros_like(y)
    of_post = ()
    for i in tl.static_range(N):
        grad_output += post[i][:, None] * grads[i]
        of_post += (grad_post[i] + tl.sum(grads[i] * y, axis=1),)
    tl.store(grad_output_ptr + flat, grad_output.to(grad_output_ptr.dtype.element_ty), mask)
    of_res = ()
    for j in tl.static_range(N):
        old = tl.load(x_ptr + tile + j * d, mask, other=0.0).to(tl.float32)
        grad_old = tl.zeros_like(old)
        for i in tl.static_range(N):
            grad_old += res[i * N + j][:, None] * grads[i]
            of_res += (grad_res[j * N + i] + tl.sum(grads[i] * old, axis=1),)
        tl.store(grad_x_ptr + tile + j * d, grad_old.to(grad_x_ptr.dtype.element_ty), mask)
    return of_post, of_res


@triton.jit
def store_transposed(ptr, p, inside_p, grad_res, N: tl.constexpr):
    """Store the gradient of H_res, a tuple [j, i], as [i, j] of each position."""
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            at = ptr + p * N * N + i * N + j
            tl.store(at, grad_res[j * N + i].to(ptr.dtype.element_ty), inside_p)
