# mypy: allow-untyped-defs
"""`depth_attend` in Triton. Sources are passed by pointer; each is loaded once for all reads, forward and backward.

A program processes a range of positions, with the queries in registers. A launch takes up to MAX_SOURCES sources. More
sources need a chain of launches, in which each result is the start of the next.

Shapes: s reads, n sources, p positions, d width, r programs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.kernels.backend import expect
from depthlm.kernels.call import operator_name, present
from depthlm.kernels.dtypes import common_dtype
from depthlm.kernels.heads_triton import load_fp32, padded

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("fused kernels need the package triton") from error

# sources per launch: the code of a kernel is unrolled over them
MAX_SOURCES = 16
# values of one tensor for all reads that a program has in registers; it has two or three such tensors
TILE = 2**14
# positions per program
ROWS = 16
# programs of a backward pass, each with its own partial sums
PROGRAMS = 256


def attend(
    query_sd: Tensor,
    sources: Sequence[Tensor],
    eps: float | None,
    bias_n: Tensor | None,
    start: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Run `depth_attend`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    reads, shape = len(query_sd), sources[0].shape
    expect("depth_attend", query_sd, query=(query_sd, (reads, shape[-1])))
    expect("depth_attend", query_sd, **{f"source {j}": (x, shape) for j, x in enumerate(sources)})
    if bias_n is not None:
        expect("depth_attend", query_sd, bias=(bias_n, (len(sources),)))
    out_spd, lse_sp = start or (None, None)
    if out_spd is not None and lse_sp is not None:
        expect("depth_attend", query_sd, **{"start of out": (out_spd, (reads, *shape))})
        expect("depth_attend", query_sd, **{"start of lse": (lse_sp, (reads, *shape[:-1]))})
    dtype, step = common_dtype(present(out_spd, *sources)), max(1, TILE // shape[-1])
    if reads > step:
        parts = [
            attend(
                query_sd[i : i + step], sources, eps, bias_n, start and (start[0][i : i + step], start[1][i : i + step])
            )
            for i in range(0, reads, step)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    for i in range(0, len(sources), MAX_SOURCES):
        bias = None if bias_n is None else bias_n[i : i + MAX_SOURCES]
        # only the last result of a chain is rounded
        part_dtype = dtype if i + MAX_SOURCES >= len(sources) else torch.float32
        out_spd, lse_sp = forward(query_sd, [*sources[i : i + MAX_SOURCES]], eps, bias, out_spd, lse_sp, part_dtype)
    assert out_spd is not None
    assert lse_sp is not None
    return out_spd, lse_sp


@torch.library.custom_op(operator_name(__name__, "depth_attend"), mutates_args=())
def forward(
    query_sd: Tensor,
    sources: list[Tensor],
    eps: float | None,
    bias_n: Tensor | None,
    start_spd: Tensor | None,
    start_sp: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return out_spd in `dtype`, and lse_sp in fp32."""
    (reads, d), shape = query_sd.shape, sources[0].shape
    out = query_sd.new_empty(reads, *shape, dtype=dtype)
    lse = query_sd.new_empty(reads, *shape[:-1], dtype=torch.float32)
    contiguous_arguments = [_contiguous(x, query_sd) for x in (query_sd, bias_n, start_spd, start_sp)]
    tensors = [padded([x.contiguous() for x in sources]), *contiguous_arguments, out, lse]
    switches = {"BIAS": bias_n is not None, "START": start_spd is not None}
    _launch(_forward, ROWS, tensors, len(sources), lse[0].numel(), reads, d, eps, switches)
    return out, lse


@torch.library.custom_op(operator_name(__name__, "depth_attend_backward"), mutates_args=())
def backward(
    grad_spd: Tensor,
    grad_sp: Tensor,
    out_spd: Tensor,
    lse_sp: Tensor,
    query_sd: Tensor,
    sources: list[Tensor],
    eps: float | None,
    bias_n: Tensor | None,
    start_spd: Tensor | None,
    start_sp: Tensor | None,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
    """Return the gradients of query_sd, of each source, and of bias_n, start_spd and start_sp, empty if missing."""
    (reads, d), positions, n = query_sd.shape, lse_sp[0].numel(), len(sources)
    rows = max(ROWS, triton.cdiv(positions, PROGRAMS))
    xs = padded([x.contiguous() for x in sources])
    grads = [torch.empty_like(x) for x in xs[:n]]
    programs = triton.cdiv(positions, rows)
    partial_dq = query_sd.new_empty(programs, reads, d, dtype=torch.float32)
    partial_dbias = query_sd.new_empty(programs, len(xs), dtype=torch.float32)
    grad_start, grad_start_lse = (_like(x, query_sd) for x in (start_spd, start_sp))
    contiguous_arguments = [_contiguous(x, query_sd) for x in (query_sd, bias_n, start_spd, start_sp)]
    taken = [x.contiguous() for x in (grad_spd, grad_sp, out_spd, lse_sp)]
    tensors = [*taken, xs, *contiguous_arguments, padded(grads), partial_dq, partial_dbias, grad_start, grad_start_lse]
    switches = {"BIAS": bias_n is not None, "START": start_spd is not None}
    _launch(_backward, rows, tensors, n, positions, reads, d, eps, switches)
    grad_bias = query_sd.new_empty(0) if bias_n is None else partial_dbias.sum(0)[:n].to(bias_n.dtype)
    return partial_dq.sum(0).to(query_sd.dtype), grads, grad_bias, grad_start, grad_start_lse


@forward.register_fake
def _(query_sd, sources, eps, bias_n, start_spd, start_sp, dtype):
    shape = (len(query_sd), *sources[0].shape)
    out = query_sd.new_empty(shape, dtype=dtype)
    return out, query_sd.new_empty(shape[:-1], dtype=torch.float32)


@backward.register_fake
def _(grad_spd, grad_sp, out_spd, lse_sp, query_sd, sources, eps, bias_n, start_spd, start_sp):
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sources]
    others = (_like(x, query_sd) for x in (bias_n, start_spd, start_sp))
    return torch.empty_like(query_sd, memory_format=torch.contiguous_format), grads, *others


def _setup_context(ctx, inputs, output):
    query, sources, ctx.eps, bias, start, start_lse, _ = inputs
    ctx.save_for_backward(*output, query, bias, start, start_lse, *sources)


def _differentiate(ctx, grad, grad_lse):
    out, lse, query, bias, start, start_lse, *sources = ctx.saved_tensors
    grad_query, grads, *others = backward(grad, grad_lse, out, lse, query, sources, ctx.eps, bias, start, start_lse)
    others = [None if x is None else g for x, g in zip((bias, start, start_lse), others, strict=True)]
    return grad_query, grads, None, *others, None


forward.register_autograd(_differentiate, setup_context=_setup_context)


def _contiguous(x: Tensor | None, unused: Tensor) -> Tensor:
    """Return x, contiguous. `unused` replaces a missing tensor, which the kernel does not read."""
    return unused if x is None else x.contiguous()


def _like(x: Tensor | None, device: Tensor) -> Tensor:
    return device.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def num_warps(numbers: int) -> int:
    """Return the number of warps of a program whose tensors have this many values each."""
    return min(16, max(4, numbers // 1024))


def _launch(kernel, rows, tensors, n, positions, reads, d, eps, switches):
    reads_padded, width = triton.next_power_of_2(reads), triton.next_power_of_2(d)
    with torch.cuda.device_of(tensors[-1]):
        kernel[(triton.cdiv(positions, rows),)](
            *tensors, n, positions, rows, d, reads, S=reads_padded, D=width,
            EPS=0.0 if eps is None else eps, NORMED=eps is not None, **switches,
            num_warps=num_warps(reads_padded * width),
        )  # fmt: skip


@triton.jit
def _score(q, x, bias_ptr, j, d, EPS: tl.constexpr, NORMED: tl.constexpr, BIAS: tl.constexpr):
    """Return the product of each query and a source, the reciprocal rms, and the score."""
    raw = tl.sum(q * x[None, :], axis=1)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / d + EPS)
    score = raw * scale
    if BIAS:
        score += tl.load(bias_ptr + j).to(tl.float32)
    return raw, scale, score


@triton.jit
def _forward(
    x_ptrs, query_ptr, bias_ptr, start_ptr, start_lse_ptr, out_ptr, lse_ptr, n, positions, rows, d, reads,
    S: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, BIAS: tl.constexpr,
    START: tl.constexpr,
):  # fmt: skip
    s, c = tl.arange(0, S), tl.arange(0, D)
    mask_s, mask_c = s < reads, c < d
    inside = mask_s[:, None] & mask_c[None, :]
    q = load_fp32(query_ptr, s[:, None] * d + c[None, :], inside)
    first = tl.program_id(0) * rows
    for row in range(first, min(first + rows, positions)):
        p = tl.cast(row, tl.int64)
        at_sp = s.to(tl.int64) * positions + p
        at_spd = at_sp[:, None] * d + c[None, :]
        if START:
            top, total = load_fp32(start_lse_ptr, at_sp, mask_s), tl.full([S], 1.0, tl.float32)
            out = load_fp32(start_ptr, at_spd, inside)
        else:
            top, total = tl.full([S], float("-inf"), tl.float32), tl.zeros([S], tl.float32)
            out = tl.zeros([S, D], tl.float32)
        for j in tl.static_range(len(x_ptrs)):
            if j < n:
                x = load_fp32(x_ptrs[j], p * d + c, mask_c)
                _, _, score = _score(q, x, bias_ptr, j, d, EPS, NORMED, BIAS)
                higher = tl.maximum(top, score)
                kept, share = tl.exp(top - higher), tl.exp(score - higher)
                total = total * kept + share
                out = out * kept[:, None] + share[:, None] * x[None, :]
                top = higher
        tl.store(out_ptr + at_spd, (out / total[:, None]).to(out_ptr.dtype.element_ty), inside)
        tl.store(lse_ptr + at_sp, top + tl.log(total), mask_s)


@triton.jit
def _backward(
    grad_ptr, grad_lse_ptr, out_ptr, lse_ptr, x_ptrs, query_ptr, bias_ptr, start_ptr, start_lse_ptr,
    grad_x_ptrs, partial_dq_ptr, partial_dbias_ptr, grad_start_ptr, grad_start_lse_ptr, n, positions, rows, d, reads,
    S: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, BIAS: tl.constexpr,
    START: tl.constexpr,
):  # fmt: skip
    s, c = tl.arange(0, S), tl.arange(0, D)
    mask_s, mask_c = s < reads, c < d
    inside = mask_s[:, None] & mask_c[None, :]
    q = load_fp32(query_ptr, s[:, None] * d + c[None, :], inside)
    grad_q = tl.zeros([S, D], tl.float32)
    of_source = tl.arange(0, len(x_ptrs))
    grad_bias = tl.zeros([len(x_ptrs)], tl.float32)
    first = tl.program_id(0) * rows
    for row in range(first, min(first + rows, positions)):
        p = tl.cast(row, tl.int64)
        at_sp = s.to(tl.int64) * positions + p
        at_spd = at_sp[:, None] * d + c[None, :]
        grad = load_fp32(grad_ptr, at_spd, inside)
        lse = load_fp32(lse_ptr, at_sp, mask_s)
        # the term that the gradients of all scores share
        common = tl.sum(grad * load_fp32(out_ptr, at_spd, inside), axis=1) - load_fp32(grad_lse_ptr, at_sp, mask_s)
        if START:
            share = tl.exp(load_fp32(start_lse_ptr, at_sp, mask_s) - lse)
            grad_share = tl.sum(grad * load_fp32(start_ptr, at_spd, inside), axis=1)
            tl.store(grad_start_ptr + at_spd, (share[:, None] * grad).to(grad_start_ptr.dtype.element_ty), inside)
            grad_start_lse = share * (grad_share - common)
            tl.store(grad_start_lse_ptr + at_sp, grad_start_lse.to(grad_start_lse_ptr.dtype.element_ty), mask_s)
        for j in tl.static_range(len(x_ptrs)):
            if j < n:
                x = load_fp32(x_ptrs[j], p * d + c, mask_c)
                raw, scale, score = _score(q, x, bias_ptr, j, d, EPS, NORMED, BIAS)
                weight = tl.exp(score - lse)
                grad_score = tl.where(mask_s, weight * (tl.sum(grad * x[None, :], axis=1) - common), 0.0)
                grad_bias += tl.where(of_source == j, tl.sum(grad_score, axis=0), 0.0)
                grad_raw = grad_score * scale
                grad_q += grad_raw[:, None] * x[None, :]
                grad_x = tl.sum(weight[:, None] * grad + grad_raw[:, None] * q, axis=0)
                if NORMED:
                    # the gradient of rms(x) is parallel to x
                    grad_x -= x * (tl.sum(grad_raw * raw, axis=0) * scale * scale / d)
                tl.store(grad_x_ptrs[j] + p * d + c, grad_x.to(grad_x_ptrs[j].dtype.element_ty), mask_c)
    program = tl.program_id(0)
    tl.store(partial_dq_ptr + (program * reads + s[:, None]) * d + c[None, :], grad_q, inside)
    tl.store(partial_dbias_ptr + program * len(x_ptrs) + of_source, grad_bias)
