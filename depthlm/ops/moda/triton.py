# mypy: allow-untyped-defs
"""`moda_depth` in Triton. Each entry is read once forward and once backward, by one launch for all entries.

A program processes BR rows, each with all queries of a key/value head at a position, and loops over the entries. It
uses fp32 vector operations and no matrix products, so any number of queries per head works. The queries of a head are
the first axis of a tile, so that a thread has all of them for its part of an entry: the entry needs no exchange
between threads, and neither does the sum of its gradient over the queries.

Shapes: b batch, t tokens, h query heads, k key/value heads, g queries per key/value head, e head size, n depth entries,
2 a key and a value, r rows (b, t, k).
"""

import math
from typing import Any

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.call import operator_name
from depthlm.ops.triton_common import check_heads, empty_heads, load_fp32, rows_of_heads, tl, triton

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


def _launch(kernel, q_bthe, tensors, entries_n2btke, *numbers):
    (b, t, h, e), (n, *_, num_kv_heads, _) = q_bthe.shape, entries_n2btke.shape
    groups, rows = h // num_kv_heads, b * t * num_kv_heads
    tiles = tile_sizes(e, groups, kernel is _backward)
    with torch.cuda.device_of(q_bthe):
        kernel[(triton.cdiv(rows, tiles["BR"]),)](
            q_bthe, *tensors, rows, t, n, *numbers, SCALE=e**-0.5, K=num_kv_heads, G=groups, E=e, **tiles, num_warps=4
        )


def tile_sizes(e: int, groups: int, backward: bool) -> dict[str, int]:
    """Return the constants of a kernel that determine the shapes of its tiles."""
    gb, ep = min(GROUP, triton.next_power_of_2(groups)), triton.next_power_of_2(e)
    return {"GB": gb, "EP": ep, "BR": max(1, (TILE // 2 if backward and gb > 4 else TILE) // ep)}


@triton.jit
def _places(rows, tokens, first, K: tl.constexpr, G: tl.constexpr, GB: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
            BR: tl.constexpr):  # fmt: skip
    """Return offsets and masks of GB queries [GB, BR, EP], their log-sum-exp [GB, BR] and entries [1, BR, EP]."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    g, e = first + tl.arange(0, GB), tl.arange(0, EP)
    inside_1re = (r < rows)[None, :, None] & (e < E)[None, None, :]
    position, head = r // K, (r % K)[None, :] * G + g[:, None]
    at_gr = (position // tokens * (K * G))[None, :] * tokens + head * tokens + (position % tokens)[None, :]
    at_gre = (g * E)[:, None, None] + (r * (G * E))[None, :, None] + e[None, None, :]
    at_1re = (r * E)[None, :, None] + e[None, None, :]
    inside_gr = (g < G)[:, None] & (r < rows)[None, :]
    return at_gre, inside_gr[:, :, None] & (e < E)[None, None, :], at_gr, inside_gr, at_1re, inside_1re


@triton.jit(do_not_specialize=["rows", "tokens", "n"])
def _forward(
    q_ptr, out_ptr, lse_ptr, entries_ptr, context_ptr, merged_ptr, rows, tokens, n,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GB: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    # values of all keys of an entry
    plane = rows.to(tl.int64) * E
    for first in range(0, G, GB):
        at_q, inside_q, at_lse, inside_lse, at, inside = _places(rows, tokens, first, K, G, GB, E, EP, BR)
        # scores are in units of log 2, since a GPU computes powers of 2
        q = load_fp32(q_ptr, at_q, inside_q) * (SCALE * LOG2E)
        context = load_fp32(out_ptr, at_q, inside_q)
        # the sequence part counts as one entry with score l and value o
        top = load_fp32(lse_ptr, at_lse, inside_lse) * LOG2E
        total = tl.full([GB, BR], 1.0, tl.float32)
        for j in tl.range(n, num_stages=3):
            entry_ptr = entries_ptr + j * 2 * plane
            key, value = load_fp32(entry_ptr, at, inside), load_fp32(entry_ptr + plane, at, inside)
            score = tl.sum(q * key, axis=2)
            # of the two factors one is 1
            rises, factor = score > top, tl.exp2(-tl.abs(score - top))
            old, weight = tl.where(rises, factor, 1.0), tl.where(rises, 1.0, factor)
            total = total * old + weight
            context = context * old[:, :, None] + weight[:, :, None] * value
            top = tl.maximum(top, score)
        context = (context / total[:, :, None]).to(context_ptr.dtype.element_ty)
        tl.store(context_ptr + at_q, context, inside_q)
        tl.store(merged_ptr + at_lse, (top + tl.log2(total)) / LOG2E, inside_lse)


@triton.jit(do_not_specialize=["rows", "tokens", "n", "fresh"])
def _backward(
    q_ptr, grad_ptr, context_ptr, grad_q_ptr, lse_ptr, entries_ptr, total_ptr, sums_ptr, rows, tokens, n, fresh,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GB: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    plane = rows.to(tl.int64) * E
    for first in range(0, G, GB):
        at_q, inside_q, at_lse, inside_lse, at, inside = _places(rows, tokens, first, K, G, GB, E, EP, BR)
        q, grad = load_fp32(q_ptr, at_q, inside_q) * SCALE, load_fp32(grad_ptr, at_q, inside_q)
        delta = tl.sum(grad * load_fp32(context_ptr, at_q, inside_q), axis=2)
        lse = load_fp32(lse_ptr, at_lse, inside_lse) * LOG2E
        grad_q = load_fp32(grad_q_ptr, at_q, inside_q)
        for j in tl.range(n, num_stages=3):
            key_at = at + j * 2 * plane
            value_at = key_at + plane
            key, value = load_fp32(entries_ptr, key_at, inside), load_fp32(entries_ptr, value_at, inside)
            p = tl.exp2(tl.sum(q * key, axis=2) * LOG2E - lse)
            grad_score = p * (tl.sum(grad * value, axis=2) - delta)
            grad_q += (grad_score * SCALE)[:, :, None] * key
            # q includes the scale; in the padding of a group, q and grad are 0
            grad_key = tl.sum(grad_score[:, :, None] * q, axis=0)[None, :, :]
            grad_value = tl.sum(p[:, :, None] * grad, axis=0)[None, :, :]
            summed = inside & ((j >= fresh) | (first > 0))
            grad_key += load_fp32(sums_ptr, key_at, summed)
            grad_value += load_fp32(sums_ptr, value_at, summed)
            tl.store(sums_ptr + key_at, grad_key.to(sums_ptr.dtype.element_ty), inside)
            tl.store(sums_ptr + value_at, grad_value.to(sums_ptr.dtype.element_ty), inside)
        tl.store(total_ptr + at_q, grad_q.to(total_ptr.dtype.element_ty), inside_q)
        # the next queries read the sums, maybe in other threads
        if first + GB < G:
            tl.debug_barrier()
