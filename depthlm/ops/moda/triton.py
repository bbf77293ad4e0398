# mypy: allow-untyped-defs
"""`moda_depth` in Triton. Each entry is read once forward and once backward, by one launch for all entries.

A program processes several rows, each with all queries of a key/value head at a position, and loops over the entries.
It uses fp32 vector operations and no matrix products, so any number of queries per head works. The queries of a head
are the first axis of a tile, so that a thread has all of them for its part of an entry: the entry needs no exchange
between threads, and neither does the sum of its gradient over the queries.

Shapes: b batch, t tokens, h query heads, k key/value heads, g queries per key/value head, e head size, n depth entries,
2 a key and a value, r rows (b, t, k).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlm.ops.autograd import operator_name
from depthlm.ops.backend import expect
from depthlm.ops.triton_common import (
    check_heads,
    constants,
    empty_heads,
    load_fp32,
    rows_of_heads,
    store_as,
    tl,
    triton,
)

LOG2E = tl.constexpr(math.log2(math.e))
# queries of a head that a program processes at once, and values of a key that it has in registers: 8 per thread are one
# load of 128 bits. The backward pass holds three tensors of the shape of the queries, so for many queries it takes half
GROUP, TILE = 8, 1024


def moda_depth(q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, entries_n2btke: Tensor) -> tuple[Tensor, Tensor]:
    """Run `depthlm.ops.moda.merge.moda_depth` in Triton."""
    _check(q_bhte, entries_n2btke, out=(out_bhte, q_bhte.shape), lse=(lse_bht, q_bhte.shape[:3]))
    return forward(q_bhte, out_bhte, lse_bht, entries_n2btke)


def moda_depth_backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    context_bhte: Tensor,
    lse_bht: Tensor,
    grad_q_bhte: Tensor,
    entries_n2btke: Tensor,
    sums_n2btke: Tensor,
    fresh: int = 0,
) -> Tensor:
    """Run `depthlm.ops.moda.merge.moda_depth_backward` in Triton."""
    alike = {"grad": grad_bhte, "context": context_bhte, "grad_q": grad_q_bhte}
    shapes = {name: (x, q_bhte.shape) for name, x in alike.items()}
    shapes |= {"lse": (lse_bht, q_bhte.shape[:3]), "sums": (sums_n2btke, entries_n2btke.shape)}
    _check(q_bhte, entries_n2btke, **shapes)
    return backward(grad_bhte, q_bhte, context_bhte, lse_bht, grad_q_bhte, entries_n2btke, sums_n2btke, fresh)


def _check(q_bhte: Tensor, entries_n2btke: Tensor, **shapes: Any) -> None:
    (b, h, t, e), n, num_kv_heads = q_bhte.shape, entries_n2btke.shape[0], entries_n2btke.shape[4]
    expect("moda", q_bhte, entries=(entries_n2btke, (n, 2, b, t, num_kv_heads, e)), **shapes)
    check_heads("moda", h, num_kv_heads)


@torch.library.custom_op(operator_name(__name__, "moda_depth"), mutates_args=())
def forward(q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, entries_n2btke: Tensor) -> tuple[Tensor, Tensor]:
    """Return context_bhte in the dtype of q, and lse_bht in fp32, over sequence and depth; not differentiable."""
    q, lse = rows_of_heads(q_bhte), lse_bht.float().contiguous()
    context, merged = torch.empty_like(q), torch.empty_like(lse)
    tensors = [rows_of_heads(out_bhte), lse, entries_n2btke.contiguous(), context, merged]
    _launch(_forward, q, tensors, entries_n2btke)
    return context.transpose(1, 2), merged


@torch.library.custom_op(operator_name(__name__, "moda_depth_backward"), mutates_args=("sums_n2btke",))
def backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    context_bhte: Tensor,
    lse_bht: Tensor,
    grad_q_bhte: Tensor,
    entries_n2btke: Tensor,
    sums_n2btke: Tensor,
    fresh: int,
) -> Tensor:
    """Return the gradient of q, and add those of the entries to the sums. sums_n2btke: contiguous."""
    assert sums_n2btke.is_contiguous()
    q, *queries = (rows_of_heads(x) for x in (q_bhte, grad_bhte, context_bhte, grad_q_bhte))
    total, lse = torch.empty_like(q), lse_bht.float().contiguous()
    tensors = [*queries, lse, entries_n2btke.contiguous(), total, sums_n2btke]
    _launch(_backward, q, tensors, entries_n2btke, fresh)
    return total.transpose(1, 2)


@forward.register_fake
def _(q_bhte, out_bhte, lse_bht, entries_n2btke):
    return empty_heads(q_bhte), lse_bht.new_empty(lse_bht.shape, dtype=torch.float32)


@backward.register_fake
def _(grad_bhte, q_bhte, context_bhte, lse_bht, grad_q_bhte, entries_n2btke, sums_n2btke, fresh):
    return empty_heads(q_bhte)


class Settings(NamedTuple):
    """The constants of both kernels. scale: of a score. groups: queries per key/value head.

    group_tile: queries of a head that are processed at once, a power of 2. head_size, padded_size: of a head, and of
    its tile, a power of 2. rows: of a program.
    """

    scale: tl.constexpr
    num_kv_heads: tl.constexpr
    groups: tl.constexpr
    group_tile: tl.constexpr
    head_size: tl.constexpr
    padded_size: tl.constexpr
    rows: tl.constexpr


def _launch(kernel, q_bthe, tensors, entries_n2btke, *numbers):
    (b, t, h, e), (n, *_, num_kv_heads, _) = q_bthe.shape, entries_n2btke.shape
    settings, rows = settings_of(e, num_kv_heads, h // num_kv_heads, kernel is _backward), b * t * num_kv_heads
    with torch.cuda.device_of(q_bthe):
        grid = (triton.cdiv(rows, settings.rows.value),)
        kernel[grid](q_bthe, *tensors, rows, t, n, *numbers, settings, num_warps=4)


def settings_of(e: int, num_kv_heads: int, groups: int, backward: bool) -> Settings:
    """Return the constants of a kernel."""
    group_tile, padded_size = min(GROUP, triton.next_power_of_2(groups)), triton.next_power_of_2(e)
    tile = TILE // 2 if backward and group_tile > 4 else TILE
    sizes = num_kv_heads, groups, group_tile, e, padded_size, max(1, tile // padded_size)
    return constants(Settings, e**-0.5, *sizes)


@triton.jit
def _places(rows, tokens, first, settings):
    """Return offsets and masks of a group of queries [g, r, e], their log-sum-exp [g, r] and entries [1, r, e]."""
    r = tl.program_id(0).to(tl.int64) * settings.rows + tl.arange(0, settings.rows)
    g, e = first + tl.arange(0, settings.group_tile), tl.arange(0, settings.padded_size)
    mask_1re = (r < rows)[None, :, None] & (e < settings.head_size)[None, None, :]
    position = r // settings.num_kv_heads
    head = (r % settings.num_kv_heads)[None, :] * settings.groups + g[:, None]
    start_r = position // tokens * (settings.num_kv_heads * settings.groups)
    at_gr = start_r[None, :] * tokens + head * tokens + (position % tokens)[None, :]
    at_1re = (r * settings.head_size)[None, :, None] + e[None, None, :]
    at_gre = (g * settings.head_size)[:, None, None] + (r * (settings.groups * settings.head_size))[None, :, None]
    mask_gr = (g < settings.groups)[:, None] & (r < rows)[None, :]
    mask_gre = mask_gr[:, :, None] & (e < settings.head_size)[None, None, :]
    return at_gre + e[None, None, :], mask_gre, at_gr, mask_gr, at_1re, mask_1re


@triton.jit(do_not_specialize=["rows", "tokens", "n"])
def _forward(q_ptr, out_ptr, lse_ptr, entries_ptr, context_ptr, merged_ptr, rows, tokens, n, settings):
    # values of all keys of an entry
    plane = rows.to(tl.int64) * settings.head_size
    for first in range(0, settings.groups, settings.group_tile):
        at_q, mask_q, at_lse, mask_lse, at, mask = _places(rows, tokens, first, settings)
        # scores are in units of log 2, since a GPU computes powers of 2
        q = load_fp32(q_ptr, at_q, mask_q) * (settings.scale * LOG2E)
        context = load_fp32(out_ptr, at_q, mask_q)
        # the sequence part counts as one entry with score l and value o
        top = load_fp32(lse_ptr, at_lse, mask_lse) * LOG2E
        total = tl.full(top.shape, 1.0, tl.float32)
        for j in tl.range(n, num_stages=3):
            entry_ptr = entries_ptr + j * 2 * plane
            key, value = load_fp32(entry_ptr, at, mask), load_fp32(entry_ptr + plane, at, mask)
            score = tl.sum(q * key, axis=2)
            # of the two factors one is 1
            rises, factor = score > top, tl.exp2(-tl.abs(score - top))
            old, weight = tl.where(rises, factor, 1.0), tl.where(rises, 1.0, factor)
            total = total * old + weight
            context = context * old[:, :, None] + weight[:, :, None] * value
            top = tl.maximum(top, score)
        store_as(context_ptr, at_q, context / total[:, :, None], mask_q)
        tl.store(merged_ptr + at_lse, (top + tl.log2(total)) / LOG2E, mask_lse)


@triton.jit(do_not_specialize=["rows", "tokens", "n", "fresh"])
def _backward(
    q_ptr, grad_ptr, context_ptr, grad_q_ptr, lse_ptr, entries_ptr, out_ptr, sums_ptr, rows, tokens, n, fresh, settings
):
    plane = rows.to(tl.int64) * settings.head_size
    for first in range(0, settings.groups, settings.group_tile):
        at_q, mask_q, at_lse, mask_lse, at, mask = _places(rows, tokens, first, settings)
        q, grad = load_fp32(q_ptr, at_q, mask_q) * settings.scale, load_fp32(grad_ptr, at_q, mask_q)
        delta = tl.sum(grad * load_fp32(context_ptr, at_q, mask_q), axis=2)
        lse = load_fp32(lse_ptr, at_lse, mask_lse) * LOG2E
        grad_q = load_fp32(grad_q_ptr, at_q, mask_q)
        for j in tl.range(n, num_stages=3):
            key_at = at + j * 2 * plane
            value_at = key_at + plane
            key, value = load_fp32(entries_ptr, key_at, mask), load_fp32(entries_ptr, value_at, mask)
            p = tl.exp2(tl.sum(q * key, axis=2) * LOG2E - lse)
            grad_score = p * (tl.sum(grad * value, axis=2) - delta)
            grad_q += (grad_score * settings.scale)[:, :, None] * key
            # q includes the scale; in the padding of a group, q and grad are 0
            grad_key = tl.sum(grad_score[:, :, None] * q, axis=0)[None, :, :]
            grad_value = tl.sum(p[:, :, None] * grad, axis=0)[None, :, :]
            summed = mask & ((j >= fresh) | (first > 0))
            store_as(sums_ptr, key_at, grad_key + load_fp32(sums_ptr, key_at, summed), mask)
            store_as(sums_ptr, value_at, grad_value + load_fp32(sums_ptr, value_at, summed), mask)
        store_as(out_ptr, at_q, grad_q, mask_q)
        # the next queries read the sums, maybe in other threads
        if first + settings.group_tile < settings.groups:
            tl.debug_barrier()
