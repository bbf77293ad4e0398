# mypy: allow-untyped-defs
"""The losses of rows of logits and the gradient of the logits in Triton, which read each logit once.

A program of the forward pass processes ROWS rows in tiles of COLUMNS logits, a program of the backward pass one tile.

Shapes: r rows, v vocabulary.
"""

import torch
from torch import Tensor

from depthlm.ops.backend import interpreted
from depthlm.ops.call import operator_name
from depthlm.ops.triton_common import tl, triton

# logits of a row that a program has in registers
COLUMNS = 4096
# a finite number below every logit: the difference of two infinities would not be a number
LOWEST = tl.constexpr(-1e30)


@torch.library.custom_op(operator_name(__name__, "cross_entropy"), mutates_args=("to_nll_r", "to_logsumexp_r"))
def losses(logits_rv: Tensor, targets_r: Tensor, to_nll_r: Tensor, to_logsumexp_r: Tensor) -> None:
    """Write nll_r and logsumexp_r in fp32. The nll of a target of -100 is undefined."""
    logits_rv = logits_rv.contiguous()
    (r, v), rows = logits_rv.shape, _rows(logits_rv)
    with torch.cuda.device_of(logits_rv):
        _losses[(triton.cdiv(r, rows),)](
            logits_rv, targets_r.contiguous(), to_nll_r, to_logsumexp_r, r, v, ROWS=rows, COLUMNS=COLUMNS, num_warps=8
        )


@torch.library.custom_op(operator_name(__name__, "cross_entropy_backward"), mutates_args=("to_rv",))
def differentiate(
    logits_rv: Tensor,
    targets_r: Tensor,
    logsumexp_r: Tensor,
    grad_nll_r: Tensor,
    grad_logsumexp_r: Tensor,
    to_rv: Tensor,
) -> None:
    """Write the gradient of the logits to to_rv, which is contiguous and may be the logits themselves."""
    logits_rv = logits_rv.contiguous()
    (r, v), rows = logits_rv.shape, _rows(logits_rv)
    rows_of_numbers = (x.contiguous() for x in (targets_r, logsumexp_r, grad_nll_r, grad_logsumexp_r))
    with torch.cuda.device_of(logits_rv):
        _differentiate[(triton.cdiv(r, rows), triton.cdiv(v, COLUMNS))](
            logits_rv, *rows_of_numbers, to_rv, r, v, ROWS=rows, COLUMNS=COLUMNS, num_warps=8
        )


@losses.register_fake
def _(logits_rv, targets_r, to_nll_r, to_logsumexp_r):
    return None


@differentiate.register_fake
def _(logits_rv, targets_r, logsumexp_r, grad_nll_r, grad_logsumexp_r, to_rv):
    return None


def _rows(logits_rv: Tensor) -> int:
    """Return the rows of a program. The interpreter takes a millisecond per program."""
    return min(256, triton.next_power_of_2(len(logits_rv))) if interpreted() else 1


@triton.jit
def _tile(start, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows of a program and their mask, and the columns of a tile, its offsets and its mask."""
    r, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
    return r, r < rows, c, (r * width)[:, None] + c[None, :], (r < rows)[:, None] & (c < width)[None, :]


@triton.jit(do_not_specialize=["rows"])
def _losses(
    logits_ptr, targets_ptr, nll_ptr, logsumexp_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    top, total = tl.full([ROWS, COLUMNS], LOWEST, tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        _, _, _, at, inside = _tile(start, rows, width, ROWS, COLUMNS)
        logit = tl.where(inside, tl.load(logits_ptr + at, inside, other=0.0).to(tl.float32), LOWEST)
        new_top = tl.maximum(top, logit)
        total = total * tl.exp(top - new_top) + tl.exp(logit - new_top)
        top = new_top
    r, inside_r, _, _, _ = _tile(0, rows, width, ROWS, COLUMNS)
    largest = tl.max(top, axis=1)
    logsumexp = largest + tl.log(tl.sum(total * tl.exp(top - largest[:, None]), axis=1))
    target = tl.maximum(tl.load(targets_ptr + r, inside_r, other=0), 0)
    logit = tl.load(logits_ptr + r * width + target, inside_r, other=0.0).to(tl.float32)
    tl.store(nll_ptr + r, logsumexp - logit, inside_r)
    tl.store(logsumexp_ptr + r, logsumexp, inside_r)


@triton.jit(do_not_specialize=["rows"])
def _differentiate(
    logits_ptr, targets_ptr, logsumexp_ptr, grad_nll_ptr, grad_logsumexp_ptr, to_ptr, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r, inside_r, c, at, inside = _tile(tl.program_id(1) * COLUMNS, rows, width, ROWS, COLUMNS)
    target = tl.maximum(tl.load(targets_ptr + r, inside_r, other=0), 0)
    logsumexp, grad_nll = (
        tl.load(logsumexp_ptr + r, inside_r, other=0.0),
        tl.load(grad_nll_ptr + r, inside_r, other=0.0),
    )
    scale = grad_nll + tl.load(grad_logsumexp_ptr + r, inside_r, other=0.0)
    softmax = tl.exp(tl.load(logits_ptr + at, inside, other=0.0).to(tl.float32) - logsumexp[:, None])
    grad = softmax * scale[:, None] - tl.where(c[None, :] == target[:, None], grad_nll[:, None], 0.0)
    tl.store(to_ptr + at, grad.to(to_ptr.dtype.element_ty), inside)
