# mypy: allow-untyped-defs
"""`moda_depth` in Triton. Entries are passed by pointer; each is read once forward and once backward.

A program processes BR rows, each with all queries of a key/value head at a position, and loops over the entries. It
uses fp32 vector operations and no matrix products, so any number of queries per head works. More than PER_LAUNCH
entries need several launches, which pass the context on in fp32.

Shapes: b batch, t tokens, h query heads, k key/value heads, g queries per key/value head, e head size, n depth entries,
r rows (b, t, k).
"""

import torch
from torch import Tensor

from depthlm.kernels.call import operator_name
from depthlm.kernels.heads_triton import empty_heads, load_fp32, padded, rows_of_heads

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("fused kernels need the package triton") from error

# the compile time of a kernel grows faster than its number of entries: 13 s for 32, 75 s for 64
PER_LAUNCH = 32
# values that a program has in registers for each tensor with the shape of the queries
FORWARD_TILE, BACKWARD_TILE = 2048, 1024


@torch.library.custom_op(operator_name(__name__, "moda_depth"), mutates_args=())
def forward(
    q_bhte: Tensor, out_bhte: Tensor, lse_bht: Tensor, keys: list[Tensor], values: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return context_bhte in the dtype of q, and lse_bht in fp32, over sequence and depth; not differentiable."""
    q, context, lse = rows_of_heads(q_bhte), rows_of_heads(out_bhte), lse_bht.float().contiguous()
    for start in range(0, len(keys), PER_LAUNCH):
        part, last = slice(start, start + PER_LAUNCH), start + PER_LAUNCH >= len(keys)
        merged, seen = torch.empty_like(q, dtype=q.dtype if last else torch.float32), torch.empty_like(lse)
        entries = [[rows_of_heads(x) for x in xs[part]] for xs in (keys, values)]
        tensors = [context, lse, *map(padded, entries), merged, seen]
        _launch(_forward, FORWARD_TILE, q, tensors, entries[0])
        context, lse = merged, seen
    return context.transpose(1, 2), lse


@torch.library.custom_op(operator_name(__name__, "moda_depth_backward"), mutates_args=())
def backward(
    grad_bhte: Tensor,
    q_bhte: Tensor,
    context_bhte: Tensor,
    lse_bht: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the gradients of the depth part: grad_q_bhte in fp32, those of keys and values in their dtypes."""
    grad, q, context = (rows_of_heads(x) for x in (grad_bhte, q_bhte, context_bhte))
    lse = lse_bht.float().contiguous()
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    grads: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start in range(0, len(keys), PER_LAUNCH):
        entries = [[rows_of_heads(x) for x in xs[start : start + PER_LAUNCH]] for xs in (keys, values)]
        new = [[torch.empty_like(x) for x in xs] for xs in entries]
        tensors = [grad, context, lse, *map(padded, entries), grad_q, *map(padded, new)]
        _launch(_backward, BACKWARD_TILE, q, tensors, entries[0])
        for xs, more in zip(grads, new, strict=True):
            xs.extend(x.transpose(1, 2) for x in more)
    return grad_q.transpose(1, 2), *grads


@forward.register_fake
def _(q_bhte, out_bhte, lse_bht, keys, values):
    return empty_heads(q_bhte), lse_bht.new_empty(lse_bht.shape, dtype=torch.float32)


@backward.register_fake
def _(grad_bhte, q_bhte, context_bhte, lse_bht, keys, values):
    return empty_heads(q_bhte, torch.float32), [empty_heads(x) for x in keys], [empty_heads(x) for x in values]


def _launch(kernel, tile, q_bthe, tensors, keys_btke):
    (b, t, h, e), num_kv_heads = q_bthe.shape, keys_btke[0].shape[2]
    groups, rows = h // num_kv_heads, b * t * num_kv_heads
    gp, ep = triton.next_power_of_2(groups), triton.next_power_of_2(e)
    block = max(1, tile // (gp * ep))
    with torch.cuda.device_of(q_bthe):
        kernel[(triton.cdiv(rows, block),)](
            q_bthe, *tensors, rows, t, len(keys_btke),
            SCALE=e**-0.5, K=num_kv_heads, G=groups, GP=gp, E=e, EP=ep, BR=block,
            num_warps=4 if gp * ep <= tile else 8,
        )  # fmt: skip


@triton.jit
def _places(rows, tokens, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
            BR: tl.constexpr):  # fmt: skip
    """Return offsets and masks of queries [BR, GP, EP], log-sum-exp [BR, GP] and entries [BR, 1, EP]."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    g, e = tl.arange(0, GP), tl.arange(0, EP)
    inside_r1e = (r < rows)[:, None, None] & (e < E)[None, None, :]
    position, head = r // K, (r % K)[:, None] * G + g[None, :]
    at_rg = (position // tokens * (K * G))[:, None] * tokens + head * tokens + (position % tokens)[:, None]
    at_rge = (r * (G * E))[:, None, None] + (g * E)[None, :, None] + e[None, None, :]
    at_r1e = (r * E)[:, None, None] + e[None, None, :]
    inside_rg = (r < rows)[:, None] & (g < G)[None, :]
    return at_rge, inside_rg[:, :, None] & (e < E)[None, None, :], at_rg, inside_rg, at_r1e, inside_r1e


@triton.jit(do_not_specialize=["rows", "tokens", "n"])
def _forward(
    q_ptr, out_ptr, lse_ptr, key_ptrs, value_ptrs, context_ptr, merged_ptr, rows, tokens, n,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    at_q, inside_q, at_lse, inside_lse, at, inside = _places(rows, tokens, K, G, GP, E, EP, BR)
    q = load_fp32(q_ptr, at_q, inside_q) * SCALE
    context = load_fp32(out_ptr, at_q, inside_q)
    # the sequence part counts as one entry with score l and value o
    top = load_fp32(lse_ptr, at_lse, inside_lse)
    total = tl.full([BR, GP], 1.0, tl.float32)
    for j in tl.static_range(len(key_ptrs)):
        if j < n:
            key, value = load_fp32(key_ptrs[j], at, inside), load_fp32(value_ptrs[j], at, inside)
            score = tl.sum(q * key, axis=2)
            new_top = tl.maximum(top, score)
            old, weight = tl.exp(top - new_top), tl.exp(score - new_top)
            total = total * old + weight
            context = context * old[:, :, None] + weight[:, :, None] * value
            top = new_top
    context = (context / total[:, :, None]).to(context_ptr.dtype.element_ty)
    tl.store(context_ptr + at_q, context, inside_q)
    tl.store(merged_ptr + at_lse, top + tl.log(total), inside_lse)


@triton.jit(do_not_specialize=["rows", "tokens", "n"])
def _backward(
    q_ptr, grad_ptr, context_ptr, lse_ptr, key_ptrs, value_ptrs, grad_q_ptr, grad_key_ptrs, grad_value_ptrs,
    rows, tokens, n,
    SCALE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    at_q, inside_q, at_lse, inside_lse, at, inside = _places(rows, tokens, K, G, GP, E, EP, BR)
    q, grad = load_fp32(q_ptr, at_q, inside_q) * SCALE, load_fp32(grad_ptr, at_q, inside_q)
    delta = tl.sum(grad * load_fp32(context_ptr, at_q, inside_q), axis=2)
    lse = load_fp32(lse_ptr, at_lse, inside_lse)
    grad_q = load_fp32(grad_q_ptr, at_q, inside_q)
    for j in tl.static_range(len(key_ptrs)):
        if j < n:
            key, value = load_fp32(key_ptrs[j], at, inside), load_fp32(value_ptrs[j], at, inside)
            p = tl.exp(tl.sum(q * key, axis=2) - lse)
            grad_score = p * (tl.sum(grad * value, axis=2) - delta)
            grad_q += grad_score[:, :, None] * key * SCALE
            # q includes the scale; in the padding of a group, q and grad are 0
            grad_key = tl.sum(grad_score[:, :, None] * q, axis=1)[:, None, :]
            grad_value = tl.sum(p[:, :, None] * grad, axis=1)[:, None, :]
            tl.store(grad_key_ptrs[j] + at, grad_key.to(grad_key_ptrs[j].dtype.element_ty), inside)
            tl.store(grad_value_ptrs[j] + at, grad_value.to(grad_value_ptrs[j].dtype.element_ty), inside)
    tl.store(grad_q_ptr + at_q, grad_q, inside_q)
