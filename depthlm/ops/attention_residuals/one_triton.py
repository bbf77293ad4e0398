# mypy: allow-untyped-defs
"""`depth_attend` for one read of up to ADDRESSES sources in Triton.

A program has all dimensions of a position, and loads each source once.

Shapes: s reads, which is 1, n sources, p positions, d width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.ops.library import register
from depthlm.ops.reads import BACKWARD, FORWARD, BackwardInputs, Kernels
from depthlm.ops.reads_triton import (
    COUNTS,
    address,
    addresses,
    aligned,
    kind_of,
    load_typed,
    narrow_dtype,
    pointers,
    store_typed,
)
from depthlm.ops.triton_common import cdiv, constants, load_fp32, next_power_of_2, on_device, split_work, tl, triton

# positions of a program
ROWS = 16
# programs of a backward pass, each with its own partial sums
PROGRAMS = 512
# values of a tensor per thread: several tensors fit into its registers
VALUES = 16


class Settings(NamedTuple):
    """Constants of the kernels. D: d. PADDED: the next power of two. NARROW: the dtype of 16-bit sources. KIND: of the
    sources (`load_typed`).
    """

    D: tl.constexpr
    PADDED: tl.constexpr
    EPS: tl.constexpr
    NARROW: tl.constexpr
    KIND: tl.constexpr


def allocate(parameters: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Return an empty lse_sp."""
    return [sources[0].new_empty(1, *sources[0].shape[:-1], dtype=torch.float32)]


@register(__name__, "depth_attend_one", schema=FORWARD)
def forward(parameters, sources, start, eps, outputs):
    query, *bias = (aligned(x) for x in parameters)
    xs, starts = [aligned(x) for x in sources], [aligned(x) for x in start] or outputs
    tensor_ptrs = query, *(bias or [query]), *starts, *outputs
    x_ptrs, _, wide, _ = addresses(xs)
    numbers = len(xs), outputs[1].numel(), ROWS, int(bool(start)), len(bias)
    settings, warps = _settings(xs, eps)
    grid = (cdiv(outputs[1].numel(), ROWS),)
    with on_device(query):
        attention_residuals_one_forward[grid](x_ptrs, wide, tensor_ptrs, *numbers, settings, num_warps=warps)


@register(__name__, "depth_attend_one_backward", schema=BACKWARD)
def launch_backward(grads, outputs, parameters, sources, start, eps, source_grads, added, sums):
    (query, *bias), (out, lse) = (aligned(x) for x in parameters), outputs
    grad, *grad_lse = (aligned(x) for x in grads)
    partial_query, partial_bias, *start_grads = sums
    xs, positions = [aligned(x) for x in sources], lse.numel()
    start_lse = aligned(start[1]) if start else lse
    read_ptrs = grad, *(grad_lse or [lse]), out, lse, query, *(bias or [query]), start_lse
    sum_ptrs = partial_query, partial_bias, *(start_grads or (out, lse))
    programs, rows = split_work(positions, PROGRAMS)
    numbers = len(xs), positions, rows, int(bool(start)), len(bias), len(grad_lse)
    settings, warps = _settings(xs, eps)
    table = addresses(xs, source_grads, added)
    with on_device(query):
        attention_residuals_one_backward[(programs,)](*table, read_ptrs, sum_ptrs, *numbers, settings, num_warps=warps)


def backward(inputs: BackwardInputs) -> list[Tensor]:
    (query, *bias), (out, lse) = inputs.parameters, inputs.outputs
    programs, _ = split_work(lse.numel(), PROGRAMS)
    partial_query = lse.new_empty(programs, query.shape[1])
    partial_bias = lse.new_empty(programs, len(inputs.sources))
    start_grads = [torch.empty_like(like, dtype=x.dtype) for x, like in zip(inputs.start, (out, lse), strict=False)]
    launch_backward(*inputs, [partial_query, partial_bias, *start_grads])
    grad_query = partial_query.sum(0, keepdim=True).to(query.dtype)
    return [grad_query, *(partial_bias.sum(0).to(x.dtype) for x in bias), *start_grads]


KERNELS = Kernels("attention_residuals", 2, allocate, forward, backward, saves_out=True)


def _settings(sources: Sequence[Tensor], eps: float | None) -> tuple[Settings, int]:
    """Return the settings, and the warps of a program."""
    d = sources[0].shape[-1]
    padded = next_power_of_2(d)
    settings = constants(Settings, d, padded, eps, narrow_dtype(sources), kind_of(sources))
    return settings, max(1, min(16, padded // (32 * VALUES)))


@triton.jit
def _score(q, x, bias_ptr, j, biased, SETTINGS):
    """Return the product of the query and a source, the reciprocal rms, and the score."""
    raw = tl.sum(q * x, axis=0)
    scale = 1.0
    if SETTINGS.EPS is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / SETTINGS.D + SETTINGS.EPS)
    return raw, scale, raw * scale + tl.load(bias_ptr + j, biased != 0, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_one_forward(x_ptrs, wide, tensor_ptrs, n, positions, rows, started, biased, SETTINGS):
    query_ptr, bias_ptr, start_ptr, start_lse_ptr, out_ptr, lse_ptr = tensor_ptrs
    c = tl.arange(0, SETTINGS.PADDED)
    mask = c < SETTINGS.D
    q = load_fp32(query_ptr, c, mask)
    first = tl.program_id(0) * rows
    for row in range(first, min(first + rows, positions)):
        at = tl.cast(row, tl.int64) * SETTINGS.D + c
        # without a start, its share is zero
        top = tl.load(start_lse_ptr + row, started != 0, other=float("-inf")).to(tl.float32)
        total = tl.where(started != 0, 1.0, 0.0)
        out = load_fp32(start_ptr, at, mask & (started != 0))
        for j in range(n):
            x = load_typed(pointers(address(x_ptrs, j), SETTINGS.NARROW), (wide >> j) & 1, at, mask, SETTINGS.KIND)
            _, _, score = _score(q, x, bias_ptr, j, biased, SETTINGS)
            higher = tl.maximum(top, score)
            kept, share = tl.exp(top - higher), tl.exp(score - higher)
            total = total * kept + share
            out = out * kept + share * x
            top = higher
        tl.store(out_ptr + at, (out / total).to(out_ptr.dtype.element_ty), mask)
        tl.store(lse_ptr + row, top + tl.log(total))


@triton.jit(do_not_specialize=COUNTS)
def attention_residuals_one_backward(
    x_ptrs, grad_ptrs, wide, added, read_ptrs, sum_ptrs, n, positions, rows, started, biased, given_lse, SETTINGS
):
    grad_ptr, grad_lse_ptr, out_ptr, lse_ptr, query_ptr, bias_ptr, start_lse_ptr = read_ptrs
    partial_query_ptr, partial_bias_ptr, grad_start_ptr, grad_start_lse_ptr = sum_ptrs
    c = tl.arange(0, SETTINGS.PADDED)
    mask = c < SETTINGS.D
    q, grad_q = load_fp32(query_ptr, c, mask), tl.zeros([SETTINGS.PADDED], tl.float32)
    program = tl.program_id(0)
    first = program * rows
    for row in range(first, min(first + rows, positions)):
        at = tl.cast(row, tl.int64) * SETTINGS.D + c
        grad = load_fp32(grad_ptr, at, mask)
        lse = tl.load(lse_ptr + row)
        product_left = tl.sum(grad * load_fp32(out_ptr, at, mask), axis=0)
        # the term that the gradients of all scores share
        common = product_left - tl.load(grad_lse_ptr + row, given_lse != 0, other=0.0).to(tl.float32)
        for j in range(n):
            x = load_typed(pointers(address(x_ptrs, j), SETTINGS.NARROW), (wide >> j) & 1, at, mask, SETTINGS.KIND)
            raw, scale, score = _score(q, x, bias_ptr, j, biased, SETTINGS)
            weight = tl.exp(score - lse)
            product = tl.sum(grad * x, axis=0)
            # the output is the sum of the weighted sources and the weighted start, which is left in the end
            product_left -= weight * product
            grad_score = weight * (product - common)
            grad_raw = grad_score * scale
            grad_q += grad_raw * x
            grad_x = weight * grad + grad_raw * q
            if SETTINGS.EPS is not None:
                # the gradient of rms(x) is parallel to x
                grad_x -= x * (grad_raw * raw * scale * scale / SETTINGS.D)
            grad_x_ptrs = pointers(address(grad_ptrs, j), SETTINGS.NARROW)
            store_typed(grad_x_ptrs, (wide >> j) & 1, (added >> j) & 1, at, grad_x, mask, SETTINGS.KIND)
            if biased != 0:
                # the sum over the rows of this program, which only one thread reads and writes
                to_ptr = partial_bias_ptr + program * n + j
                tl.store(to_ptr, grad_score + tl.load(to_ptr, row > first, other=0.0))
        if started != 0:
            share = tl.exp(tl.load(start_lse_ptr + row).to(tl.float32) - lse)
            tl.store(grad_start_ptr + at, (share * grad).to(grad_start_ptr.dtype.element_ty), mask)
            grad_start_lse = product_left - share * common
            tl.store(grad_start_lse_ptr + row, grad_start_lse.to(grad_start_lse_ptr.dtype.element_ty))
    tl.store(partial_query_ptr + program * SETTINGS.D + c, grad_q, mask)
