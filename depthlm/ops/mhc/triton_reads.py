# mypy: allow-untyped-defs, disable-error-code="assignment"
"""The read H_pre X of `mhc_post_pre` and `hyper_post_pre` in Triton, and the gradient of H_pre.

Shapes: p positions (batch and tokens), n streams, j stream, d hidden size.
"""

from depthlm.ops.mhc.triton_streams import add_columns, load_tiles, tile, zeros
from depthlm.ops.triton_common import load_fp32, store_as, tl, triton


@triton.jit
def read_streams(read_ptr, x_ptr, pre, p, mask_p, d, settings):
    """Store H_pre X. The last columns come first: in the kernel that wrote X they are still in the cache."""
    last = (d - 1) // settings.columns * settings.columns
    for back in range(0, d, settings.columns):
        at_x, at_y, mask = tile(p, mask_p, last - back, d, settings)
        tiles = load_tiles(x_ptr, at_x, mask, d, settings)
        read = tl.zeros(mask.shape, tl.float32)
        for j in tl.static_range(settings.n):
            read += pre[j][:, None] * tiles[j]
        store_as(read_ptr, at_y, read, mask)


@triton.jit
def add_pre_gradient(sums, grad_read_ptr, x_ptr, at_x, at_y, mask, d, settings):
    """Add the columns of a tile to the sums of the gradient of H_pre in a read of the streams x."""
    grad_read, added = load_fp32(grad_read_ptr, at_y, mask), ()
    for j in tl.static_range(settings.n):
        added += (add_columns(sums[j], grad_read * load_fp32(x_ptr + at_x, j * d, mask)),)
    return added


@triton.jit
def pre_gradient(grad_read_ptr, x_ptr, p, mask_p, d, settings):
    """Return the gradient of H_pre in a read of the streams x."""
    grad_pre = zeros([settings.positions, settings.lanes], settings.n)
    for start in range(0, d, settings.columns):
        at_x, at_y, mask = tile(p, mask_p, start, d, settings)
        grad_pre = add_pre_gradient(grad_pre, grad_read_ptr, x_ptr, at_x, at_y, mask, d, settings)
    totals = ()
    for j in tl.static_range(settings.n):
        totals += (tl.sum(grad_pre[j], axis=1),)
    return totals
