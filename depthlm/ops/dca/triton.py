# mypy: allow-untyped-defs, disable-error-code="assignment"
"""`gated_reads` in Triton.

The forward pass computes the scores, and then a tile of all reads per program. The backward pass computes the gradients
of the scores, for which it needs all dimensions, and then the gradients of everything else.

Shapes: s reads, n sources, p positions, d width. A tile: R positions, C dimensions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.call import operator_name
from depthlm.ops.reads_triton import (
    COUNTS,
    DOT_READS,
    FEW_WARPS,
    HALF_ROWS,
    MAX_READS,
    TILE_ROWS,
    TILE_WIDTH,
    WARPS,
    aligned,
    check_reads,
    in_groups,
    joined,
    load_reads,
    load_source,
    narrow_dtype,
    of_group,
    one_narrow_dtype,
    row_programs,
    scores,
    store_grad,
    store_reads,
    table_of,
    widest,
    zeros_of_reads,
)
from depthlm.ops.source_sums import reserve_sums, returned, tokens_of
from depthlm.ops.triton_common import tl, triton

# sources and reads of a program of the gradients of parameters, which are as many sums in registers
SOURCES, READS = 3, 3


def gated(bias_snd: Tensor, gate_snd: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Run `gated_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    shape = (len(bias_snd), len(sources), sources[0].shape[-1])
    expect("dca", bias_snd, bias=(bias_snd, shape), gate=(gate_snd, shape))
    check_reads("dca", bias_snd, sources, start_spd)
    dtype, xs = widest(sources, start_spd), one_narrow_dtype(sources)
    outputs, tokens = [], tokens_of(xs)
    for group in in_groups(len(bias_snd)):
        bias, gate = (of_group(x, group) for x in (bias_snd, gate_snd))
        start = None if start_spd is None else of_group(start_spd, group)
        outputs.append(forward(bias, gate, xs, start, dtype, tokens)[0])
    return joined(outputs)


@torch.library.custom_op(operator_name(__name__, "gated_reads"), mutates_args=())
def forward(
    bias_snd: Tensor,
    gate_snd: Tensor,
    sources: list[Tensor],
    start_spd: Tensor | None,
    dtype: torch.dtype,
    tokens: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return out_spd in `dtype`, and the scores_nsp of the gates.

    tokens: see `depthlm.ops.source_sums`; may be empty.
    """
    reads, shape, n = len(bias_snd), sources[0].shape, len(sources)
    d, positions = shape[-1], shape[:-1].numel()
    xs, bias = [aligned(x) for x in sources], aligned(bias_snd)
    table = table_of(xs)
    score, _ = scores(aligned(gate_snd), table, xs, reads, None)
    out = bias.new_empty(reads, *shape, dtype=dtype)
    start = out if start_spd is None else aligned(start_spd)
    with torch.cuda.device_of(out):
        _forward[(triton.cdiv(positions, TILE_ROWS), triton.cdiv(d, TILE_WIDTH))](
            table, bias, score, start, out, n, positions, reads, int(start_spd is not None), D=d, R=TILE_ROWS,
            C=TILE_WIDTH, S=MAX_READS, NARROW=narrow_dtype(xs), num_warps=WARPS,
        )  # fmt: skip
    return out, score


@torch.library.custom_op(operator_name(__name__, "gated_reads_backward"), mutates_args=("grads",))
def backward(
    grad_spd: Tensor,
    bias_snd: Tensor,
    gate_snd: Tensor,
    score_nsp: Tensor,
    sources: list[Tensor],
    grads: list[Tensor],
    added: list[bool],
) -> Tensor:
    """Return the gradients of biases and gates, [2, s, n, d]. Write those of the sources to `grads`, or add them."""
    (reads, n, d), positions = bias_snd.shape, sources[0].shape[:-1].numel()
    xs, bias, gate, grad = [aligned(x) for x in sources], aligned(bias_snd), aligned(gate_snd), aligned(grad_spd)
    table, grad_score = table_of(xs, grads, added), torch.empty_like(score_nsp)
    programs, rows = row_programs(positions)
    partial = bias.new_empty(2, programs, reads, n, d, dtype=torch.float32)
    counts, rows_of_tiles, columns = (
        (n, positions, reads),
        triton.cdiv(positions, TILE_ROWS),
        triton.cdiv(d, TILE_WIDTH),
    )
    settings = {"D": d, "C": TILE_WIDTH, "NARROW": narrow_dtype(xs)}
    with torch.cuda.device_of(grad):
        _score_grads[(rows_of_tiles,)](
            grad, table, bias, score_nsp, grad_score, *counts, R=TILE_ROWS, S=MAX_READS, **settings, num_warps=WARPS
        )
        _source_grads[(rows_of_tiles, columns)](
            grad, table, bias, gate, score_nsp, grad_score, *counts, R=TILE_ROWS, S=MAX_READS, DOT_S=DOT_READS,
            **settings, num_warps=FEW_WARPS,
        )  # fmt: skip
        _parameter_grads[(triton.cdiv(n, SOURCES) * triton.cdiv(reads, READS), columns, programs)](
            grad, table, bias, score_nsp, grad_score, partial, *counts, rows, R=HALF_ROWS, S=READS, DOT_S=DOT_READS,
            J=SOURCES, **settings, num_warps=FEW_WARPS,
        )  # fmt: skip
    return partial.sum(1)


@forward.register_fake
def _(bias_snd, gate_snd, sources, start_spd, dtype, tokens):
    shape = sources[0].shape
    score = bias_snd.new_empty(len(sources), len(bias_snd), shape[:-1].numel(), dtype=torch.float32)
    return bias_snd.new_empty(len(bias_snd), *shape, dtype=dtype), score


@backward.register_fake
def _(grad_spd, bias_snd, gate_snd, score_nsp, sources, grads, added):
    return bias_snd.new_empty(2, *bias_snd.shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    bias, gate, sources, start, _, tokens = inputs
    ctx.num_tokens = len(tokens)
    ctx.start = None if start is None else start.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(bias, gate, output[1], *sources)


def _differentiate(ctx, grad, _):
    bias, gate, score, *sources = ctx.saved_tensors
    grads, added = reserve_sums(ctx, ctx.num_tokens, sources)
    of_bias, of_gate = backward(grad, bias, gate, score, sources, grads, added)
    of_sources, of_tokens = returned(ctx.num_tokens, grads)
    return (
        of_bias.to(bias.dtype),
        of_gate.to(gate.dtype),
        of_sources,
        None if ctx.start is None else grad.to(ctx.start),
        None,
        of_tokens,
    )


forward.register_autograd(_differentiate, setup_context=_setup_context)


@triton.jit
def _load_bias(bias_ptr, s, j, n, c, D: tl.constexpr):
    return tl.load(bias_ptr + (s * n + j) * D + c, c < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load_score(score_ptr, s, j, p, positions, reads):
    return tl.load(score_ptr + (j * reads + s) * positions + p, (p < positions) & (s < reads), other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    table_ptr, bias_ptr, score_ptr, start_ptr, out_ptr, n, positions, reads, started, D: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    p, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    inside = (p < positions)[:, None] & (c < D)[None, :]
    at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
    out = load_reads(start_ptr, at, inside & (started != 0), positions, reads, D, S)
    for j in range(n):
        x = load_source(table_ptr, j, at, inside, NARROW)
        sums = ()
        for s in tl.static_range(S):
            total = out[s]
            if s < reads:
                score = _load_score(score_ptr, s, j, p, positions, reads)[:, None]
                total += tl.maximum(_load_bias(bias_ptr, s, j, n, c, D) + score, 0.0) * x
            sums += (total,)
        out = sums
    store_reads(out_ptr, at, out, inside, positions, reads, D, S)


@triton.jit(do_not_specialize=COUNTS)
def _score_grads(
    grad_ptr, table_ptr, bias_ptr, score_ptr, grad_score_ptr, n, positions, reads, D: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * R + tl.arange(0, R)
    for first in range(0, D, C):
        c = first + tl.arange(0, C)
        inside = (p < positions)[:, None] & (c < D)[None, :]
        at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
        grad = load_reads(grad_ptr, at, inside, positions, reads, D, S)
        for j in range(n):
            x = load_source(table_ptr, j, at, inside, NARROW)
            for s in tl.static_range(S):
                if s < reads:
                    score = _load_score(score_ptr, s, j, p, positions, reads)[:, None]
                    open_ = _load_bias(bias_ptr, s, j, n, c, D) + score > 0.0
                    of_score = tl.sum(tl.where(open_, grad[s] * x, 0.0), axis=1)
                    to_ptr = grad_score_ptr + (j * reads + s) * positions + p
                    of_score += tl.load(to_ptr, (p < positions) & (first > 0), other=0.0)
                    tl.store(to_ptr, of_score, p < positions)
        # the sums that one thread stored are read by others
        tl.debug_barrier()


@triton.jit(do_not_specialize=COUNTS)
def _source_grads(
    grad_ptr, table_ptr, bias_ptr, gate_ptr, score_ptr, grad_score_ptr, n, positions, reads, D: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, DOT_S: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    p, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    dot_s = tl.arange(0, DOT_S)
    inside = (p < positions)[:, None] & (c < D)[None, :]
    at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
    grad = load_reads(grad_ptr, at, inside, positions, reads, D, S)
    for j in range(n):
        of_scores = _load_score(grad_score_ptr, dot_s[None, :], j, p[:, None], positions, reads)
        gate_at = ((dot_s * n + j) * D)[:, None] + c[None, :]
        gate = tl.load(gate_ptr + gate_at, (dot_s < reads)[:, None] & (c < D)[None, :], other=0.0).to(tl.float32)
        grad_x = tl.dot(of_scores, gate, input_precision="tf32x3")
        for s in tl.static_range(S):
            if s < reads:
                score = _load_score(score_ptr, s, j, p, positions, reads)[:, None]
                grad_x += tl.maximum(_load_bias(bias_ptr, s, j, n, c, D) + score, 0.0) * grad[s]
        store_grad(table_ptr, j, at, grad_x, inside, NARROW)


@triton.jit(do_not_specialize=COUNTS)
def _parameter_grads(
    grad_ptr, table_ptr, bias_ptr, score_ptr, grad_score_ptr, partial_ptr, n, positions, reads, rows,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, DOT_S: tl.constexpr, J: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    # groups of reads are next to each other, so that a source is loaded from memory for only one of them
    groups = tl.cdiv(reads, S)
    first_s, first_j = tl.program_id(0) % groups * S, tl.program_id(0) // groups * J
    c, dot_s = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, DOT_S)
    grad_gate, grad_bias = zeros_of_reads(J, DOT_S, C), zeros_of_reads(S * J, R, C)
    first = tl.program_id(2) * rows
    for row in range(first, min(first + rows, positions), R):
        p = row + tl.arange(0, R)
        inside = (p < positions)[:, None] & (c < D)[None, :]
        at = tl.cast(p, tl.int64)[:, None] * D + c[None, :]
        xs, grad_gates, grad_biases = (), (), ()
        for k in tl.static_range(J):
            j = min(first_j + k, n - 1)
            x, of_gate = load_source(table_ptr, j, at, inside, NARROW), grad_gate[k]
            # the product has room for all reads
            if first_s == 0:
                of_scores = _load_score(grad_score_ptr, dot_s[:, None], j, p[None, :], positions, reads)
                of_gate = tl.dot(of_scores, x, of_gate, input_precision="tf32x3")
            xs += (x,)
            grad_gates += (of_gate,)
        for s in tl.static_range(S):
            read = first_s + s
            grad_at = tl.cast(positions, tl.int64) * (read * D) + at
            grad = tl.load(grad_ptr + grad_at, inside & (read < reads), other=0.0).to(tl.float32)
            for k in tl.static_range(J):
                of_bias = grad_bias[s * J + k]
                if read < reads:
                    j = min(first_j + k, n - 1)
                    score = _load_score(score_ptr, read, j, p, positions, reads)[:, None]
                    open_ = _load_bias(bias_ptr, read, j, n, c, D) + score > 0.0
                    of_bias += tl.where(open_, grad * xs[k], 0.0)
                grad_biases += (of_bias,)
        grad_gate, grad_bias = grad_gates, grad_biases
    # the partial sums of the biases come first, then those of the gates
    size = tl.cast(reads * n, tl.int64) * D
    partial_ptr += tl.program_id(2) * size
    for k in tl.static_range(J):
        j = first_j + k
        if j < n:
            for s in tl.static_range(S):
                if first_s + s < reads:
                    of_bias = tl.sum(grad_bias[s * J + k], axis=0)
                    tl.store(partial_ptr + ((first_s + s) * n + j) * D + c, of_bias, c < D)
            if first_s == 0:
                to_ptr = partial_ptr + tl.num_programs(2) * size + ((dot_s * n + j) * D)[:, None] + c[None, :]
                tl.store(to_ptr, grad_gate[k], (dot_s < reads)[:, None] & (c < D)[None, :])
