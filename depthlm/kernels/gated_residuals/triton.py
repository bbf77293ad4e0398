# mypy: allow-untyped-defs
"""`weighted_reads` and `gated_reads` in Triton. Sources are passed by pointer; each is loaded once for all reads.

A program processes a range of positions. A launch takes up to MAX_SOURCES sources. More sources need a chain of
launches, in which each result is the start of the next.

Shapes: s reads, n sources, p positions, d width, r programs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.kernels.attention_residuals.triton import MAX_SOURCES, PROGRAMS, ROWS, num_warps
from depthlm.kernels.backend import expect
from depthlm.kernels.call import operator_name, present
from depthlm.kernels.dtypes import common_dtype
from depthlm.kernels.heads_triton import load_fp32, padded

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("fused kernels need the package triton") from error

# values of one tensor for all reads that a program has in registers; it has four such tensors
TILE = 2**13


def weighted(weights_sn: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None) -> Tensor:
    """Run `weighted_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    expect("depth_sums", weights_sn, weights=(weights_sn, (len(weights_sn), len(sources))))
    return _chained(weights_sn, None, sources, start_spd)


def gated(bias_snd: Tensor, gate_snd: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None) -> Tensor:
    """Run `gated_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    shape = (len(bias_snd), len(sources), sources[0].shape[-1])
    expect("depth_sums", bias_snd, bias=(bias_snd, shape), gate=(gate_snd, shape))
    return _chained(bias_snd, gate_snd, sources, start_spd)


def _chained(weights: Tensor, gate: Tensor | None, sources: Sequence[Tensor], start_spd: Tensor | None) -> Tensor:
    shape = sources[0].shape
    expect("depth_sums", weights, **{f"source {j}": (x, shape) for j, x in enumerate(sources)})
    if start_spd is not None:
        expect("depth_sums", weights, start=(start_spd, (len(weights), *shape)))
    dtype, step = common_dtype(present(start_spd, *sources)), max(1, TILE // shape[-1])
    if len(weights) > step:
        outputs = []
        for i in range(0, len(weights), step):
            group = slice(i, i + step)
            gate_group, start = (None if x is None else x[group] for x in (gate, start_spd))
            outputs.append(_chained(weights[group], gate_group, sources, start))
        return torch.cat(outputs)
    for i in range(0, len(sources), MAX_SOURCES):
        part = slice(i, i + MAX_SOURCES)
        # only the last result of a chain is rounded
        part_dtype = dtype if i + MAX_SOURCES >= len(sources) else torch.float32
        gate_part = None if gate is None else gate[:, part]
        start_spd = forward(weights[:, part], gate_part, [*sources[part]], start_spd, part_dtype)
    assert start_spd is not None
    return start_spd


@torch.library.custom_op(operator_name(__name__, "depth_sums"), mutates_args=())
def forward(
    weights: Tensor, gate_snd: Tensor | None, sources: list[Tensor], start_spd: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return out_spd in `dtype`. weights: [s, n], or with a gate its bias, [s, n, d]."""
    reads, shape = len(weights), sources[0].shape
    out = weights.new_empty(reads, *shape, dtype=dtype)
    xs, arguments = padded([x.contiguous() for x in sources]), _contiguous_arguments(weights, gate_snd, start_spd)
    _launch(_forward, ROWS, [xs, *arguments, out], weights, gate_snd, shape, START=start_spd is not None)
    return out


@torch.library.custom_op(operator_name(__name__, "depth_sums_backward"), mutates_args=())
def backward(
    grad_spd: Tensor, weights: Tensor, gate_snd: Tensor | None, sources: list[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the gradients of the weights, of the gate (empty without one) and of each source."""
    xs, shape = padded([x.contiguous() for x in sources]), sources[0].shape
    positions = sources[0].numel() // shape[-1]
    rows = max(ROWS, triton.cdiv(positions, PROGRAMS))
    grads = [torch.empty_like(x) for x in xs[: len(sources)]]
    programs = triton.cdiv(positions, rows)
    partial_dweights = weights.new_empty(programs, *weights.shape, dtype=torch.float32)
    partial_dgate = partial_dweights.new_empty(0) if gate_snd is None else torch.empty_like(partial_dweights)
    arguments = _contiguous_arguments(weights, gate_snd, None)[:2]
    tensors = [grad_spd.contiguous(), xs, *arguments, padded(grads), partial_dweights, partial_dgate]
    _launch(_backward, rows, tensors, weights, gate_snd, shape)
    grad_gate = partial_dgate if gate_snd is None else partial_dgate.sum(0).to(gate_snd.dtype)
    return partial_dweights.sum(0).to(weights.dtype), grad_gate, grads


@forward.register_fake
def _(weights, gate_snd, sources, start_spd, dtype):
    return weights.new_empty((len(weights), *sources[0].shape), dtype=dtype)


@backward.register_fake
def _(grad_spd, weights, gate_snd, sources):
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sources]
    grad_gate = weights.new_empty(0, dtype=torch.float32) if gate_snd is None else gate_snd.new_empty(gate_snd.shape)
    return weights.new_empty(weights.shape), grad_gate, grads


def _setup_context(ctx, inputs, output):
    weights, gate, sources, start, _ = inputs
    ctx.start = None if start is None else start.dtype
    ctx.save_for_backward(weights, gate, *sources)


def _differentiate(ctx, grad):
    weights, gate, *sources = ctx.saved_tensors
    grad_weights, grad_gate, grads = backward(grad, weights, gate, sources)
    grad_start = None if ctx.start is None else grad.to(ctx.start)
    return grad_weights, None if gate is None else grad_gate, grads, grad_start, None


forward.register_autograd(_differentiate, setup_context=_setup_context)


def _contiguous_arguments(weights: Tensor, gate_snd: Tensor | None, start_spd: Tensor | None) -> list[Tensor]:
    """Return contiguous kernel arguments. The weights replace a missing tensor, which the kernel does not read."""
    return [weights.contiguous() if x is None else x.contiguous() for x in (weights, gate_snd, start_spd)]


def _launch(kernel, rows, tensors, weights, gate, shape, **switches):
    (reads, n), d = weights.shape[:2], shape[-1]
    positions = shape[:-1].numel()
    reads_padded, width = triton.next_power_of_2(reads), triton.next_power_of_2(d)
    with torch.cuda.device_of(weights):
        kernel[(triton.cdiv(positions, rows),)](
            *tensors, n, positions, rows, d, reads, S=reads_padded, D=width, GATED=gate is not None, **switches,
            num_warps=num_warps(reads_padded * width),
        )  # fmt: skip


@triton.jit
def _weights(weights_ptr, gate_ptr, x, s, c, j, n, d, mask_s, inside, GATED: tl.constexpr):
    """Return the weights of a source for each read, [S, 1], or with gates [S, D]."""
    at_sn = s * n + j
    if GATED:
        at_snd = at_sn[:, None] * d + c[None, :]
        score = tl.sum(load_fp32(gate_ptr, at_snd, inside) * x[None, :], axis=1)
        return tl.maximum(load_fp32(weights_ptr, at_snd, inside) + score[:, None], 0.0)
    else:
        return load_fp32(weights_ptr, at_sn, mask_s)[:, None]


@triton.jit
def _forward(
    x_ptrs, weights_ptr, gate_ptr, start_ptr, out_ptr, n, positions, rows, d, reads,
    S: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    s, c = tl.arange(0, S), tl.arange(0, D)
    mask_s, mask_c = s < reads, c < d
    inside = mask_s[:, None] & mask_c[None, :]
    first = tl.program_id(0) * rows
    for row in range(first, min(first + rows, positions)):
        p = tl.cast(row, tl.int64)
        at_spd = (s.to(tl.int64) * positions + p)[:, None] * d + c[None, :]
        if START:
            out = load_fp32(start_ptr, at_spd, inside)
        else:
            out = tl.zeros([S, D], tl.float32)
        for j in tl.static_range(len(x_ptrs)):
            if j < n:
                x = load_fp32(x_ptrs[j], p * d + c, mask_c)
                out += _weights(weights_ptr, gate_ptr, x, s, c, j, n, d, mask_s, inside, GATED) * x[None, :]
        tl.store(out_ptr + at_spd, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _backward(
    grad_ptr, x_ptrs, weights_ptr, gate_ptr, grad_x_ptrs, partial_dweights_ptr, partial_dgate_ptr, n, positions, rows,
    d, reads, S: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    s, c = tl.arange(0, S), tl.arange(0, D)
    mask_s, mask_c = s < reads, c < d
    inside = mask_s[:, None] & mask_c[None, :]
    program = tl.program_id(0)
    first = program * rows
    if GATED:
        # the outer loop is over sources: the partial sums of only one source fit into registers
        for j in tl.static_range(len(x_ptrs)):
            if j < n:
                at_snd = (s * n + j)[:, None] * d + c[None, :]
                gate = load_fp32(gate_ptr, at_snd, inside)
                grad_gate, grad_bias = tl.zeros([S, D], tl.float32), tl.zeros([S, D], tl.float32)
                for row in range(first, min(first + rows, positions)):
                    p = tl.cast(row, tl.int64)
                    grad = load_fp32(grad_ptr, (s.to(tl.int64) * positions + p)[:, None] * d + c[None, :], inside)
                    x = load_fp32(x_ptrs[j], p * d + c, mask_c)
                    gates = _weights(weights_ptr, gate_ptr, x, s, c, j, n, d, mask_s, inside, GATED)
                    of_gates = tl.where(gates > 0, grad * x[None, :], 0.0)
                    grad_bias += of_gates
                    grad_score = tl.sum(of_gates, axis=1)
                    grad_gate += grad_score[:, None] * x[None, :]
                    grad_x = tl.sum(gates * grad + grad_score[:, None] * gate, axis=0)
                    tl.store(grad_x_ptrs[j] + p * d + c, grad_x.to(grad_x_ptrs[j].dtype.element_ty), mask_c)
                part = program.to(tl.int64) * reads * n * d
                tl.store(partial_dweights_ptr + part + at_snd, grad_bias, inside)
                tl.store(partial_dgate_ptr + part + at_snd, grad_gate, inside)
    else:
        of_source = tl.arange(0, len(x_ptrs))
        grad_weights = tl.zeros([S, len(x_ptrs)], tl.float32)
        for row in range(first, min(first + rows, positions)):
            p = tl.cast(row, tl.int64)
            grad = load_fp32(grad_ptr, (s.to(tl.int64) * positions + p)[:, None] * d + c[None, :], inside)
            for j in tl.static_range(len(x_ptrs)):
                if j < n:
                    x = load_fp32(x_ptrs[j], p * d + c, mask_c)
                    weights = _weights(weights_ptr, gate_ptr, x, s, c, j, n, d, mask_s, inside, GATED)
                    of_weights = tl.sum(grad * x[None, :], axis=1)
                    grad_weights += tl.where(of_source[None, :] == j, of_weights[:, None], 0.0)
                    grad_x = tl.sum(weights * grad, axis=0)
                    tl.store(grad_x_ptrs[j] + p * d + c, grad_x.to(grad_x_ptrs[j].dtype.element_ty), mask_c)
        at_sn = (program * reads + s[:, None]) * n + of_source[None, :]
        tl.store(partial_dweights_ptr + at_sn, grad_weights, mask_s[:, None] & (of_source < n)[None, :])
