# mypy: allow-untyped-defs
"""`moda_depth` in Triton. All entries are read by one launch forward and by one backward.

A program has all queries of a key/value head at a position, and loops over the entries there, a tile of them at a time.
Scores and sums are products of the queries, padded to 16, and the entries, which tensor cores compute. If queries and
entries have the same 16 bits, so have the probabilities and the gradients of scores, as in flash attention. Groups of
16 queries are processed one after the other, and each of them reads the entries again. For heads of up to 64 values in
16 bits, a program is a single warp, so that no warp waits for another one, and many programs run at once.

Shapes: b batch, t tokens, h query heads, k key/value heads, g queries per key/value head, e head size, n depth entries,
2 a key and a value, r rows (b, t, k).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlm.ops.backend import expect, interpreted
from depthlm.ops.library import register
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import (
    check_heads,
    constants,
    empty_heads,
    load_fp32,
    next_power_of_2,
    on_device,
    rows_of_heads,
    store_as,
    tl,
    triton,
    triton_type,
)

LOG2E = tl.constexpr(math.log2(math.e))
# queries of a head, and entries, that a program processes at once: `tl.dot` requires 16
GROUP, TILE = tl.constexpr(16), tl.constexpr(tiles_of("moda")["TILE"])


def _check(q_bhte: Tensor, entries_n2btke: Tensor, **shapes: Any) -> None:
    (b, h, t, e), n, num_kv_heads = q_bhte.shape, entries_n2btke.shape[0], entries_n2btke.shape[4]
    expect("moda", q_bhte, entries=(entries_n2btke, (n, 2, b, t, num_kv_heads, e)), **shapes)
    check_heads("moda", h, num_kv_heads)


def _outputs(q_bhte, out_bhte, lse_bht, entries_n2btke):
    return empty_heads(q_bhte), lse_bht.new_empty(lse_bht.shape, dtype=torch.float32)


def _gradient(grad_bhte, q_bhte, attended_bhte, lse_bht, grad_q_bhte, entries_n2btke, sums_n2btke, fresh):
    return empty_heads(q_bhte)


@register("moda_depth", _outputs)
def forward(q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, entries_n2btke: Tensor) -> tuple[Tensor, Tensor]:
    """Run `depthlm.ops.moda.merge.moda_depth` in Triton; not differentiable."""
    _check(q_bhte, entries_n2btke, out=(out_bhte, q_bhte.shape), lse=(lse_bht, q_bhte.shape[:3]))
    q, lse = rows_of_heads(q_bhte), lse_bht.float().contiguous()
    attended, merged = torch.empty_like(q), torch.empty_like(lse)
    tensors = [rows_of_heads(out_bhte), lse, entries_n2btke.contiguous(), attended, merged]
    _launch(moda_forward, q, tensors, entries_n2btke)
    return attended.transpose(1, 2), merged


@register("moda_depth_backward", _gradient, mutates=["sums_n2btke"])
def backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    attended_bhte: Tensor,
    lse_bht: Tensor,
    grad_q_bhte: Tensor,
    entries_n2btke: Tensor,
    sums_n2btke: Tensor,
    fresh: int,
) -> Tensor:
    """Run `depthlm.ops.moda.merge.moda_depth_backward` in Triton. sums_n2btke: contiguous."""
    alike = {"grad": grad_bhte, "attended": attended_bhte, "grad_q": grad_q_bhte}
    shapes = {name: (x, q_bhte.shape) for name, x in alike.items()}
    shapes |= {"lse": (lse_bht, q_bhte.shape[:3]), "sums": (sums_n2btke, entries_n2btke.shape)}
    _check(q_bhte, entries_n2btke, **shapes)
    assert sums_n2btke.is_contiguous()
    q, *queries = (rows_of_heads(x) for x in (q_bhte, grad_bhte, attended_bhte, grad_q_bhte))
    total, lse = torch.empty_like(q), lse_bht.float().contiguous()
    tensors = [*queries, lse, entries_n2btke.contiguous(), total, sums_n2btke]
    _launch(moda_backward, q, tensors, entries_n2btke, fresh)
    return total.transpose(1, 2)


class Settings(NamedTuple):
    """The constants of both kernels. scale: of a score. groups: queries per key/value head.

    head_size, padded_size: of a head, and of its tile, a power of 2. dtype: of the factors of matrix products.
    stages: tiles of entries that are in shared memory or on their way to it, and one more; 1: none, only registers.
    """

    scale: tl.constexpr
    num_kv_heads: tl.constexpr
    groups: tl.constexpr
    head_size: tl.constexpr
    padded_size: tl.constexpr
    dtype: tl.constexpr
    stages: tl.constexpr


def _launch(kernel, q_bthe, tensors, entries_n2btke, *numbers):
    (b, t, h, e), (n, *_, num_kv_heads, _) = q_bthe.shape, entries_n2btke.shape
    # of different dtypes, both are exact only in fp32. In 16 bits, Triton's interpreter computes wrong products
    dtype = entries_n2btke.dtype if entries_n2btke.dtype == q_bthe.dtype and not interpreted() else torch.float32
    settings, warps = settings_of(e, num_kv_heads, h // num_kv_heads, dtype)
    rows = b * t * num_kv_heads
    with on_device(q_bthe):
        kernel[(rows,)](q_bthe, *tensors, rows, t, n, *numbers, settings, num_warps=warps)


def settings_of(e: int, num_kv_heads: int, groups: int, dtype: torch.dtype) -> tuple[Settings, int]:
    """Return the constants of a kernel, and its warps."""
    padded_size = max(16, next_power_of_2(e))
    # with more bytes, shared memory would be too small on some GPUs
    nbytes = padded_size * dtype.itemsize
    sizes = num_kv_heads, groups, e, padded_size, triton_type(dtype)
    stages = tiles_of("moda")["STAGES"] if nbytes <= 256 else 1
    return constants(Settings, e**-0.5, *sizes, stages), max(1, nbytes // 128)


@triton.jit
def _dot(a, b, settings):
    return tl.dot(a.to(settings.dtype), b.to(settings.dtype), input_precision="tf32x3")


@triton.jit
def _queries(tokens, first, settings):
    """Return offsets and masks of a group of queries [g, e] and of their log-sum-exp [g]."""
    r, g = tl.program_id(0).to(tl.int64), first + tl.arange(0, GROUP)
    e, position = tl.arange(0, settings.padded_size), r // settings.num_kv_heads
    head = position // tokens * settings.num_kv_heads + r % settings.num_kv_heads
    at_g = (head * settings.groups + g) * tokens + position % tokens
    at_ge = r * (settings.groups * settings.head_size) + g[:, None] * settings.head_size + e[None, :]
    mask_g = g < settings.groups
    return at_ge, mask_g[:, None] & (e < settings.head_size)[None, :], at_g, mask_g


@triton.jit
def _entries(plane, settings):
    """Return the entries [n] of a tile, the offsets [n, e] of the keys of the first one, and the mask [e] of a head."""
    n, e = tl.arange(0, TILE), tl.arange(0, settings.padded_size)
    at_ne = tl.program_id(0).to(tl.int64) * settings.head_size + n[:, None] * (2 * plane) + e[None, :]
    return n, at_ne, e < settings.head_size


@triton.jit(do_not_specialize=["rows", "tokens", "n"])
def moda_forward(q_ptr, out_ptr, lse_ptr, entries_ptr, attended_ptr, merged_ptr, rows, tokens, n, settings):
    # values of all keys of an entry
    plane = rows.to(tl.int64) * settings.head_size
    tile_n, tile_ne, mask_e = _entries(plane, settings)
    for first in range(0, settings.groups, GROUP):
        at_q, mask_q, at_lse, mask_lse = _queries(tokens, first, settings)
        q_ge, attended_ge = tl.load(q_ptr + at_q, mask_q, other=0.0), load_fp32(out_ptr, at_q, mask_q)
        # the sequence part counts as one entry with score l and value o. Scores are in units of log 2, since a GPU
        # computes powers of 2
        top_g, total_g = load_fp32(lse_ptr, at_lse, mask_lse) * LOG2E, tl.full((GROUP,), 1.0, tl.float32)
        for j in tl.range(0, n, TILE, num_stages=settings.stages):
            valid_n = tile_n < n - j
            at, mask = tile_ne + j * 2 * plane, valid_n[:, None] & mask_e[None, :]
            key_ne = tl.load(entries_ptr + at, mask, other=0.0)
            value_ne = tl.load(entries_ptr + at + plane, mask, other=0.0)
            score_gn = _dot(q_ge, tl.trans(key_ne), settings) * (settings.scale * LOG2E)
            score_gn = tl.where(valid_n[None, :], score_gn, float("-inf"))
            higher_g = tl.maximum(top_g, tl.max(score_gn, axis=1))
            factor_g, p_gn = tl.exp2(top_g - higher_g), tl.exp2(score_gn - higher_g[:, None])
            total_g = total_g * factor_g + tl.sum(p_gn, axis=1)
            attended_ge = attended_ge * factor_g[:, None] + _dot(p_gn, value_ne, settings)
            top_g = higher_g
        store_as(attended_ptr, at_q, attended_ge / total_g[:, None], mask_q)
        tl.store(merged_ptr + at_lse, (top_g + tl.log2(total_g)) / LOG2E, mask_lse)


@triton.jit(do_not_specialize=["rows", "tokens", "n", "fresh"])
def moda_backward(
    q_ptr, grad_ptr, attended_ptr, grad_q_ptr, lse_ptr, entries_ptr, out_ptr, sums_ptr, rows, tokens, n, fresh, settings
):
    plane = rows.to(tl.int64) * settings.head_size
    tile_n, tile_ne, mask_e = _entries(plane, settings)
    for first in range(0, settings.groups, GROUP):
        at_q, mask_q, at_lse, mask_lse = _queries(tokens, first, settings)
        q_ge, grad_ge = tl.load(q_ptr + at_q, mask_q, other=0.0), tl.load(grad_ptr + at_q, mask_q, other=0.0)
        delta_g = tl.sum(grad_ge.to(tl.float32) * load_fp32(attended_ptr, at_q, mask_q), axis=1)
        lse_g = load_fp32(lse_ptr, at_lse, mask_lse) * LOG2E
        grad_q_ge = load_fp32(grad_q_ptr, at_q, mask_q)
        for j in tl.range(0, n, TILE, num_stages=settings.stages):
            valid_n = tile_n < n - j
            at, mask = tile_ne + j * 2 * plane, valid_n[:, None] & mask_e[None, :]
            key_ne = tl.load(entries_ptr + at, mask, other=0.0)
            value_ne = tl.load(entries_ptr + at + plane, mask, other=0.0)
            summed = mask & ((tile_n >= fresh - j) | (first > 0))[:, None]
            sum_key, sum_value = load_fp32(sums_ptr, at, summed), load_fp32(sums_ptr, at + plane, summed)
            # queries are columns, so that the two larger products have these tiles as they are
            score_ng = _dot(key_ne, tl.trans(q_ge), settings) * (settings.scale * LOG2E)
            p_ng = tl.where(valid_n[:, None], tl.exp2(score_ng - lse_g[None, :]), 0.0)
            # in the padding of a group, q and grad are 0
            grad_p_ng = _dot(value_ne, tl.trans(grad_ge), settings)
            grad_score_ng = p_ng * (grad_p_ng - delta_g[None, :]) * settings.scale
            store_as(sums_ptr, at, _dot(grad_score_ng, q_ge, settings) + sum_key, mask)
            store_as(sums_ptr, at + plane, _dot(p_ng, grad_ge, settings) + sum_value, mask)
            grad_q_ge += _dot(tl.trans(grad_score_ng), key_ne, settings)
        store_as(out_ptr, at_q, grad_q_ge, mask_q)
        # the next queries read the sums, maybe in other threads
        if first + GROUP < settings.groups:
            tl.debug_barrier()
