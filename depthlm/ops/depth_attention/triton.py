# mypy: allow-untyped-defs
"""`depth_value_mix` in Triton. Sources are passed by pointer; each is read once forward and once backward.

A program processes several rows. A row is one key/value head at one position.

Shapes: b batch, t tokens, h query heads, k key/value heads, g queries per key/value head, e head size, n sources and
the layer itself, r rows (b, t, k).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlm.ops.autograd import call
from depthlm.ops.backend import expect
from depthlm.ops.dtypes import common_dtype
from depthlm.ops.library import register
from depthlm.ops.tiles import tiles_of
from depthlm.ops.triton_common import (
    cdiv,
    check_heads,
    constants,
    empty_heads,
    load_fp32,
    next_power_of_2,
    on_device,
    pad,
    rows_of_heads,
    store_as,
    tl,
    triton,
)

# values of one tensor that a program has in registers
_TILES = tiles_of("depth_attention")
TILE, WARPS = _TILES["TILE"], _TILES["WARPS"]


def depth_value_mix(q_bhte: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Run `depth_value_mix`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    (b, h, t, e), num_kv_heads = q_bhte.shape, keys[0].shape[1]
    if len(keys) != len(values):
        raise ValueError(f"depth_attention: {len(keys)} keys and {len(values)} values, must be equally many")
    check_heads("depth_attention", h, num_kv_heads)
    entries = {f"{name}s[{j}]": x for name, xs in (("key", keys), ("value", values)) for j, x in enumerate(xs)}
    expect("depth_attention", q_bhte, **{name: (x, (b, num_kv_heads, t, e)) for name, x in entries.items()})
    return call(ValueMix, q_bhte, *keys, *values)


class ValueMix(torch.autograd.Function):
    """Returns vmix_bkte of q_bhte, all keys and all values."""

    @staticmethod
    def forward(ctx, q, *entries):
        mix, lse = forward(q, *_halves(entries))
        ctx.save_for_backward(q, mix, lse, *entries)
        return mix

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, mix, lse, *entries = ctx.saved_tensors
        grad_q, grad_keys, grad_values = backward(grad, q, mix, lse, *_halves(entries))
        return grad_q, *grad_keys, *grad_values


def _halves(entries):
    return list(entries[: len(entries) // 2]), list(entries[len(entries) // 2 :])


def _outputs(q_bhte, keys, values):
    mix = empty_heads(values[0], common_dtype(values))
    return mix, mix.new_empty(mix.transpose(1, 2).shape[:3], dtype=torch.float32)


def _gradients(grad_bkte, q_bhte, mix_bkte, lse_btk, keys, values):
    return empty_heads(q_bhte), [empty_heads(x) for x in keys], [empty_heads(x) for x in values]


@register("depth_value_mix", _outputs)
def forward(q_bhte: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return vmix_bkte in the widest dtype of the values, and the log-sum-exp of the scores, lse_btk, in fp32."""
    key, value = ([rows_of_heads(x) for x in xs] for xs in (keys, values))
    mix = torch.empty_like(value[0], dtype=common_dtype(values))
    lse = torch.empty(mix.shape[:3], dtype=torch.float32, device=mix.device)
    _launch(depth_attention_forward, q_bhte, [Entries(pad(key), pad(value)), mix, lse], key)
    return mix.transpose(1, 2), lse


@register("depth_value_mix_backward", _gradients)
def backward(
    grad_bkte: Tensor, q_bhte: Tensor, mix_bkte: Tensor, lse_btk: Tensor, keys: list[Tensor], values: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the gradients of q, of each key and of each value."""
    grad, mix, lse = rows_of_heads(grad_bkte), rows_of_heads(mix_bkte), lse_btk.contiguous()
    key, value = ([rows_of_heads(x) for x in xs] for xs in (keys, values))
    grad_q = torch.empty_like(rows_of_heads(q_bhte))
    grads = [[torch.empty_like(x) for x in xs] for xs in (key, value)]
    tensors = [Entries(pad(key), pad(value)), mix, lse, grad, grad_q, Entries(*map(pad, grads))]
    _launch(depth_attention_backward, q_bhte, tensors, key)
    grad_keys, grad_values = ([x.transpose(1, 2) for x in xs] for xs in grads)
    return grad_q.transpose(1, 2), grad_keys, grad_values


class Entries(NamedTuple):
    """Pointers to the keys and the values of all sources, x_btke."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


class Settings(NamedTuple):
    """The constants of both kernels. scale: from the sum of a head's queries to the factor of its scores.

    groups: queries per key/value head. head_size, padded_size: of a head, and of its tile, a power of 2. rows: of a
    program.
    """

    scale: tl.constexpr
    groups: tl.constexpr
    head_size: tl.constexpr
    padded_size: tl.constexpr
    rows: tl.constexpr


def _launch(kernel, q_bhte, tensors, keys_btke):
    (b, h, t, e), num_kv_heads = q_bhte.shape, keys_btke[0].shape[2]
    groups, rows, padded_size = h // num_kv_heads, b * t * num_kv_heads, next_power_of_2(e)
    settings = constants(Settings, e**-0.5 / groups, groups, e, padded_size, max(1, TILE // padded_size))
    with on_device(q_bhte):
        grid = (cdiv(rows, settings.rows.value),)
        kernel[grid](rows_of_heads(q_bhte), *tensors, rows, len(keys_btke), settings, num_warps=WARPS)


@triton.jit
def _places(rows, settings):
    """Return the rows of a program and their mask, and the offsets of their elements and their mask."""
    r = tl.program_id(0).to(tl.int64) * settings.rows + tl.arange(0, settings.rows)
    e = tl.arange(0, settings.padded_size)
    mask = (r < rows)[:, None] & (e < settings.head_size)[None, :]
    return r, r < rows, (r * settings.head_size)[:, None] + e[None, :], mask


@triton.jit
def _query_offset(r, g, settings):
    """Return the distance of query g of a head from the row of its key."""
    return (r * ((settings.groups - 1) * settings.head_size) + g * settings.head_size)[:, None]


@triton.jit
def _mean_query(q_ptr, r, at, mask, settings):
    """Return qbar / sqrt(e)."""
    total = load_fp32(q_ptr, at + _query_offset(r, 0, settings), mask)
    for g in tl.static_range(1, settings.groups):
        total += load_fp32(q_ptr, at + _query_offset(r, g, settings), mask)
    return total * settings.scale


@triton.jit(do_not_specialize=["rows", "n"])
def depth_attention_forward(q_ptr, entries, mix_ptr, lse_ptr, rows, n, settings):
    r, row_mask, at, mask = _places(rows, settings)
    query = _mean_query(q_ptr, r, at, mask, settings)
    top, total = tl.full(r.shape, float("-inf"), tl.float32), tl.zeros(r.shape, tl.float32)
    mix = tl.zeros(at.shape, tl.float32)
    for j in tl.static_range(len(entries.k)):
        if j < n:
            key, value = load_fp32(entries.k[j], at, mask), load_fp32(entries.v[j], at, mask)
            score = tl.sum(query * key, axis=1)
            new_top = tl.maximum(top, score)
            old, weight = tl.exp(top - new_top), tl.exp(score - new_top)
            total = total * old + weight
            mix = mix * old[:, None] + weight[:, None] * value
            top = new_top
    store_as(mix_ptr, at, mix / total[:, None], mask)
    tl.store(lse_ptr + r, top + tl.log(total), row_mask)


@triton.jit(do_not_specialize=["rows", "n"])
def depth_attention_backward(q_ptr, entries, mix_ptr, lse_ptr, grad_ptr, grad_q_ptr, grads, rows, n, settings):
    r, row_mask, at, mask = _places(rows, settings)
    query, grad = _mean_query(q_ptr, r, at, mask, settings), load_fp32(grad_ptr, at, mask)
    delta = tl.sum(grad * load_fp32(mix_ptr, at, mask), axis=1)
    lse = load_fp32(lse_ptr, r, row_mask)
    grad_query = tl.zeros(at.shape, tl.float32)
    for j in tl.static_range(len(entries.k)):
        if j < n:
            key, value = load_fp32(entries.k[j], at, mask), load_fp32(entries.v[j], at, mask)
            alpha = tl.exp(tl.sum(query * key, axis=1) - lse)
            grad_score = alpha * (tl.sum(grad * value, axis=1) - delta)
            grad_query += grad_score[:, None] * key
            store_as(grads.k[j], at, grad_score[:, None] * query, mask)
            store_as(grads.v[j], at, alpha[:, None] * grad, mask)
    for g in tl.static_range(settings.groups):
        store_as(grad_q_ptr, at + _query_offset(r, g, settings), grad_query * settings.scale, mask)
