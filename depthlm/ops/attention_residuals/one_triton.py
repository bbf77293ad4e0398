# mypy: allow-untyped-defs
"""`depth_attend` for one read of up to ADDRESSES sources in Triton.

A program has all dimensions of a position, and loads each source once.

Shapes: n sources, p positions, d width, r programs.
"""

import torch
from torch import Tensor

from depthlm.ops.call import operator_name
from depthlm.ops.reads_triton import COUNTS, address, addresses, aligned, load_at, narrow_dtype, store_at
from depthlm.ops.source_sums import reserve_sums, returned
from depthlm.ops.triton_common import tl, triton

# positions of a program
ROWS = 16
# programs of a backward pass, each with its own partial sums
PROGRAMS = 512
# values of a tensor per thread: several tensors fit into its registers
VALUES = 16


@torch.library.custom_op(operator_name(__name__, "depth_attend_one"), mutates_args=())
def forward(
    query_d: Tensor,
    sources: list[Tensor],
    eps: float | None,
    bias_n: Tensor | None,
    start_pd: Tensor | None,
    start_p: Tensor | None,
    dtype: torch.dtype,
    tokens: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return out_pd in `dtype`, and lse_p in fp32."""
    d, shape, n = len(query_d), sources[0].shape, len(sources)
    xs, query, positions = [aligned(x) for x in sources], aligned(query_d), shape[:-1].numel()
    out, lse = query.new_empty(shape, dtype=dtype), query.new_empty(shape[:-1], dtype=torch.float32)
    start, start_lse = (y if x is None else aligned(x) for x, y in ((start_pd, out), (start_p, lse)))
    flags = int(start_pd is not None), int(bias_n is not None)
    with torch.cuda.device_of(out):
        _forward[(triton.cdiv(positions, ROWS),)](
            *addresses(xs), query, query if bias_n is None else aligned(bias_n), start, start_lse, out, lse,
            n, positions, ROWS, *flags, **_settings(d, eps, xs),
        )  # fmt: skip
    return out, lse


@torch.library.custom_op(operator_name(__name__, "depth_attend_one_backward"), mutates_args=("grads",))
def backward(
    grad_pd: Tensor,
    grad_p: Tensor | None,
    out_pd: Tensor,
    lse_p: Tensor,
    query_d: Tensor,
    sources: list[Tensor],
    eps: float | None,
    bias_n: Tensor | None,
    start_dtype: torch.dtype | None,
    start_p: Tensor | None,
    grads: list[Tensor],
    added: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query_d, and of bias_n, start_pd and start_p, empty if missing.

    Write those of the sources to `grads`, or add them to it. start_dtype: the dtype of start_pd.
    """
    d, n, positions = len(query_d), len(sources), lse_p.numel()
    xs, query = [aligned(x) for x in sources], aligned(query_d)
    rows = triton.cdiv(positions, PROGRAMS)
    programs = triton.cdiv(positions, rows)
    partial_query = query.new_empty(programs, d, dtype=torch.float32)
    partial_bias = query.new_empty(programs, n, dtype=torch.float32)
    grad, out, lse = (aligned(x) for x in (grad_pd, out_pd, lse_p))
    grad_lse, start_lse = (lse if x is None else aligned(x) for x in (grad_p, start_p))
    grad_start = out.new_empty(out.shape if start_dtype else 0, dtype=start_dtype)
    grad_start_lse = lse.new_empty(lse.shape if start_dtype else 0, dtype=start_lse.dtype)
    flags = (int(x is not None) for x in (start_dtype, bias_n, grad_p))
    with torch.cuda.device_of(query):
        _backward[(programs,)](
            grad, grad_lse, out, lse, *addresses(xs, grads, added), query, query if bias_n is None else aligned(bias_n),
            start_lse, partial_query, partial_bias, grad_start, grad_start_lse, n, positions, rows, *flags,
            **_settings(d, eps, xs),
        )  # fmt: skip
    grad_bias = query.new_empty(0) if bias_n is None else partial_bias.sum(0).to(bias_n.dtype)
    return partial_query.sum(0).to(query_d.dtype), grad_bias, grad_start, grad_start_lse


@forward.register_fake
def _(query_d, sources, eps, bias_n, start_pd, start_p, dtype, tokens):
    shape = sources[0].shape
    return query_d.new_empty(shape, dtype=dtype), query_d.new_empty(shape[:-1], dtype=torch.float32)


@backward.register_fake
def _(grad_pd, grad_p, out_pd, lse_p, query_d, sources, eps, bias_n, start_dtype, start_p, grads, added):
    others = (
        like.new_empty(0) if x is None else x.new_empty(x.shape) for x, like in ((bias_n, query_d), (start_p, lse_p))
    )
    grad_bias, grad_start_lse = others
    grad_start = out_pd.new_empty(out_pd.shape if start_dtype else 0, dtype=start_dtype)
    return query_d.new_empty(query_d.shape), grad_bias, grad_start, grad_start_lse


def _setup_context(ctx, inputs, output):
    query, sources, ctx.eps, bias, start, start_lse, _, tokens = inputs
    ctx.num_tokens = len(tokens)
    # most reads are the last of their output, whose lse nobody uses
    ctx.set_materialize_grads(False)
    # the gradients follow without the start, which would be saved for no other reason
    ctx.start_dtype = None if start is None else start.dtype
    ctx.save_for_backward(*output, query, bias, start_lse, *sources)


def _differentiate(ctx, grad, grad_lse):
    out, lse, query, bias, start_lse, *sources = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    grads, added = reserve_sums(ctx, ctx.num_tokens, sources)
    grad_query, *others = backward(
        grad, grad_lse, out, lse, query, sources, ctx.eps, bias, ctx.start_dtype, start_lse, grads, added
    )
    others = [None if x is None else g for x, g in zip((bias, start_lse, start_lse), others, strict=True)]
    of_sources, of_tokens = returned(ctx.num_tokens, grads)
    return grad_query, of_sources, None, *others, None, of_tokens


forward.register_autograd(_differentiate, setup_context=_setup_context)


def _settings(d, eps, sources):
    padded = triton.next_power_of_2(d)
    return {
        **{"WIDTH": d, "D": padded, "EPS": eps or 0.0, "NORMED": eps is not None, "NARROW": narrow_dtype(sources)},
        "num_warps": max(1, min(16, padded // (32 * VALUES))),
    }


@triton.jit
def _load(ptr, at, inside):
    return tl.load(ptr + at, inside, other=0.0).to(tl.float32)


@triton.jit
def _score(q, x, bias_ptr, j, biased, WIDTH: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr):
    """Return the product of the query and a source, the reciprocal rms, and the score."""
    raw = tl.sum(q * x, axis=0)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + EPS)
    return raw, scale, raw * scale + tl.load(bias_ptr + j, biased != 0, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    x_ptrs, grad_ptrs, wide, added, query_ptr, bias_ptr, start_ptr, start_lse_ptr, out_ptr, lse_ptr, n, positions, rows,
    started, biased,
    WIDTH: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, D)
    q = _load(query_ptr, c, c < WIDTH)
    first = tl.program_id(0) * rows
    for row in range(first, min(first + rows, positions)):
        at = tl.cast(row, tl.int64) * WIDTH + c
        # without a start, its share is zero
        top = tl.load(start_lse_ptr + row, started != 0, other=float("-inf")).to(tl.float32)
        total = tl.where(started != 0, 1.0, 0.0)
        out = _load(start_ptr, at, (c < WIDTH) & (started != 0))
        for j in range(n):
            x = load_at(address(x_ptrs, j), (wide >> j) & 1, at, c < WIDTH, NARROW)
            _, _, score = _score(q, x, bias_ptr, j, biased, WIDTH, EPS, NORMED)
            higher = tl.maximum(top, score)
            kept, share = tl.exp(top - higher), tl.exp(score - higher)
            total = total * kept + share
            out = out * kept + share * x
            top = higher
        tl.store(out_ptr + at, (out / total).to(out_ptr.dtype.element_ty), c < WIDTH)
        tl.store(lse_ptr + row, top + tl.log(total))


@triton.jit(do_not_specialize=COUNTS)
def _backward(
    grad_ptr, grad_lse_ptr, out_ptr, lse_ptr, x_ptrs, grad_ptrs, wide, added, query_ptr, bias_ptr, start_lse_ptr,
    partial_query_ptr, partial_bias_ptr, grad_start_ptr, grad_start_lse_ptr, n, positions, rows, started, biased,
    given_lse,
    WIDTH: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, D)
    q, grad_q = _load(query_ptr, c, c < WIDTH), tl.zeros([D], tl.float32)
    program = tl.program_id(0)
    first = program * rows
    for row in range(first, min(first + rows, positions)):
        at = tl.cast(row, tl.int64) * WIDTH + c
        grad = _load(grad_ptr, at, c < WIDTH)
        lse = tl.load(lse_ptr + row)
        # the term that the gradients of all scores share
        of_start = tl.sum(grad * _load(out_ptr, at, c < WIDTH), axis=0)
        common = of_start - tl.load(grad_lse_ptr + row, given_lse != 0, other=0.0).to(tl.float32)
        for j in range(n):
            x = load_at(address(x_ptrs, j), (wide >> j) & 1, at, c < WIDTH, NARROW)
            raw, scale, score = _score(q, x, bias_ptr, j, biased, WIDTH, EPS, NORMED)
            weight = tl.exp(score - lse)
            product = tl.sum(grad * x, axis=0)
            # the output is the sum of the weighted sources and the weighted start
            of_start -= weight * product
            grad_score = weight * (product - common)
            grad_raw = grad_score * scale
            grad_q += grad_raw * x
            grad_x = weight * grad + grad_raw * q
            if NORMED:
                # the gradient of rms(x) is parallel to x
                grad_x -= x * (grad_raw * raw * scale * scale / WIDTH)
            store_at(address(grad_ptrs, j), (wide >> j) & 1, (added >> j) & 1, at, grad_x, c < WIDTH, NARROW)
            if biased != 0:
                # the sum over the rows of this program, which only one thread reads and writes
                to_ptr = partial_bias_ptr + program * n + j
                tl.store(to_ptr, grad_score + tl.load(to_ptr, row > first, other=0.0))
        if started != 0:
            share = tl.exp(tl.load(start_lse_ptr + row).to(tl.float32) - lse)
            tl.store(grad_start_ptr + at, (share * grad).to(grad_start_ptr.dtype.element_ty), c < WIDTH)
            grad_start_lse = of_start - share * common
            tl.store(grad_start_lse_ptr + row, grad_start_lse.to(grad_start_lse_ptr.dtype.element_ty))
    tl.store(partial_query_ptr + program * WIDTH + c, grad_q, c < WIDTH)
