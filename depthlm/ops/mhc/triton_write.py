# mypy: allow-untyped-defs
"""A write to the streams alone, in Triton, for streams that are computed again in the backward pass.

Shapes: b batch, t tokens, p positions (batch and tokens), n streams, i new stream, j old stream, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.call import operator_name
from depthlm.ops.mhc.rebuilding import saved_streams
from depthlm.ops.mhc.triton_streams import mixed_tile, stream_tiles, vectors
from depthlm.ops.triton_common import tl, triton

# positions and columns per program
POSITIONS, COLUMNS = 16, 64


def check_streams(operator: str, x_btnd: Tensor, pending: Sequence[Tensor] | None) -> None:
    """Check the streams, and the output, post and res of a pending write."""
    b, t, n, d = x_btnd.shape
    expect(operator, x_btnd, x=(x_btnd, (b, t, n, d)))
    if pending is not None:
        output_btd, post_btn, res_btij = pending
        expect(operator, x_btnd, output=(output_btd, (b, t, d)), post=(post_btn, (b, t, n)))
        expect(operator, x_btnd, res=(res_btij, (b, t, n, n)))


def write_again(node: Any) -> Tensor:
    """Return X' of a node of `depthlm.ops.mhc.rebuilding` whose first saved tensors are X, y, H_post and H_res."""
    x_btnd, output_btd, post_btn, res_btij, *_ = saved_streams(node)
    return write_streams(x_btnd, output_btd, post_btn, res_btij)


@torch.library.custom_op(operator_name(__name__, "write_streams"), mutates_args=())
def write_streams(x_btnd: Tensor, output_btd: Tensor, post_btn: Tensor, res_btij: Tensor) -> Tensor:
    """Return X'_btnd = H_res X + H_post^T y, with the same bits as `mhc_post_pre` and `hyper_post_pre` in Triton."""
    b, t, n, d = x_btnd.shape
    new = torch.empty_like(x_btnd, memory_format=torch.contiguous_format)
    parts = [part.contiguous() for part in (x_btnd, output_btd, post_btn, res_btij)]
    with torch.cuda.device_of(x_btnd):
        write_kernel[(triton.cdiv(b * t, POSITIONS), triton.cdiv(d, COLUMNS))](
            *parts, new, b * t, d, N=n, BP=POSITIONS, BD=COLUMNS, num_warps=4
        )
    return new


@write_streams.register_fake
def _(x_btnd, output_btd, post_btn, res_btij):
    return x_btnd.new_empty(x_btnd.shape)


@triton.jit
def write_kernel(
    x_ptr, output_ptr, post_ptr, res_ptr, new_ptr, positions, d, N: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr
):
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = p < positions
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = inside[:, None] & (column < d)[None, :]
    tile = (p * N * d)[:, None] + column[None, :]
    post, res = vectors(post_ptr, p * N, inside, N), vectors(res_ptr, p * N * N, inside, N * N)
    y = tl.load(output_ptr + (p * d)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
    old = stream_tiles(x_ptr, tile, mask, d, N)
    for i in tl.static_range(N):
        tl.store(new_ptr + tile + i * d, mixed_tile(i, old, y, post, res, N).to(new_ptr.dtype.element_ty), mask)
