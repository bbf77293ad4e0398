# mypy: allow-untyped-defs
"""The losses of rows of logits and the gradient of the logits in Triton, which read each logit once.

A program of the forward pass processes a tile of rows and columns at a time, a program of the backward pass one tile.

Shapes: r rows, v vocabulary.
"""

from typing import NamedTuple

from torch import Tensor

from depthlm.ops.backend import interpreted
from depthlm.ops.cross_entropy.naive import Rows
from depthlm.ops.library import register
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import cdiv, constants, load_fp32, next_power_of_2, on_device, store_as, tl, triton

_TILES = tiles_of("cross_entropy")
COLUMNS, WARPS = _TILES["COLUMNS"], _TILES["WARPS"]
# a finite number below every logit: the difference of two infinities would not be a number
LOWEST = tl.constexpr(-1e30)


class Tile(NamedTuple):
    """The constants of both kernels: the rows of a program, and the logits of a row that it has in registers."""

    rows: tl.constexpr
    columns: tl.constexpr


@register("cross_entropy", mutates=("to_nll_r", "to_logsumexp_r"))
def losses(logits_rv: Tensor, targets_r: Tensor, to_nll_r: Tensor, to_logsumexp_r: Tensor) -> None:
    """Write nll_r and logsumexp_r in fp32. The nll of a target of -100 is undefined."""
    logits_rv = logits_rv.contiguous()
    (r, v), tile = logits_rv.shape, _tile(logits_rv)
    grid = (cdiv(r, tile.rows.value),)
    with on_device(logits_rv):
        cross_entropy_forward[grid](
            logits_rv, targets_r.contiguous(), to_nll_r, to_logsumexp_r, r, v, tile, num_warps=WARPS
        )


@register("cross_entropy_backward", mutates=("to_rv",))
def differentiate(logits_rv: Tensor, rows: list[Tensor], to_rv: Tensor) -> None:
    """Write the gradient of the logits to to_rv, which is contiguous and may be the logits themselves.

    rows: those of `Rows`.
    """
    logits_rv = logits_rv.contiguous()
    (r, v), tile = logits_rv.shape, _tile(logits_rv)
    numbers = Rows(*(x.contiguous() for x in rows))
    grid = (cdiv(r, tile.rows.value), cdiv(v, COLUMNS))
    with on_device(logits_rv):
        cross_entropy_backward[grid](logits_rv, numbers, to_rv, r, v, tile, num_warps=WARPS)


def _tile(logits_rv: Tensor) -> Tile:
    # a program takes a millisecond in the interpreter
    rows = min(256, next_power_of_2(len(logits_rv))) if interpreted() else 1
    return constants(Tile, rows, COLUMNS)


@triton.jit
def _places(start, rows, width, tile):
    """Return the rows of a program and their mask, and the columns of a tile, its offsets and its mask."""
    r = tl.program_id(0).to(tl.int64) * tile.rows + tl.arange(0, tile.rows)
    c = start + tl.arange(0, tile.columns)
    return r, r < rows, c, (r * width)[:, None] + c[None, :], (r < rows)[:, None] & (c < width)[None, :]


@triton.jit(do_not_specialize=["rows"])
def cross_entropy_forward(logits_ptr, targets_ptr, nll_ptr, logsumexp_ptr, rows, width, tile):
    top = tl.full([tile.rows, tile.columns], LOWEST, tl.float32)
    total = tl.zeros(top.shape, tl.float32)
    for start in range(0, width, tile.columns):
        _, _, _, at, mask = _places(start, rows, width, tile)
        logit = tl.where(mask, load_fp32(logits_ptr, at, mask), LOWEST)
        new_top = tl.maximum(top, logit)
        total = total * tl.exp(top - new_top) + tl.exp(logit - new_top)
        top = new_top
    r, row_mask, _, _, _ = _places(0, rows, width, tile)
    largest = tl.max(top, axis=1)
    logsumexp = largest + tl.log(tl.sum(total * tl.exp(top - largest[:, None]), axis=1))
    target = tl.maximum(tl.load(targets_ptr + r, row_mask, other=0), 0)
    tl.store(nll_ptr + r, logsumexp - load_fp32(logits_ptr, r * width + target, row_mask), row_mask)
    tl.store(logsumexp_ptr + r, logsumexp, row_mask)


@triton.jit(do_not_specialize=["rows"])
def cross_entropy_backward(logits_ptr, numbers, to_ptr, rows, width, tile):
    r, row_mask, c, at, mask = _places(tl.program_id(1) * tile.columns, rows, width, tile)
    target = tl.maximum(tl.load(numbers.targets + r, row_mask, other=0), 0)
    logsumexp = tl.load(numbers.logsumexp + r, row_mask, other=0.0)
    grad_nll = tl.load(numbers.grad_nll + r, row_mask, other=0.0)
    scale = grad_nll + tl.load(numbers.grad_logsumexp + r, row_mask, other=0.0)
    softmax = tl.exp(load_fp32(logits_ptr, at, mask) - logsumexp[:, None])
    grad = softmax * scale[:, None] - tl.where(c[None, :] == target[:, None], grad_nll[:, None], 0.0)
    store_as(to_ptr, at, grad, mask)
