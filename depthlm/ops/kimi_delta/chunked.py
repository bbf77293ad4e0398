"""Kimi Delta Attention (arXiv 2510.26692) by chunks of tokens, with a hand-written backward pass.

A token i of a chunk corrects the error e_i of the state: S_i = diag(exp g_i) S_{i-1} + p_i e_i^T with p_i = beta_i k_i.
If the first token of the chunk follows the state S, then, with the rows, columns, scores A and decay of `chunks.py`,

    e = v - rows_k S - A_k e;    o = rows_q S + A_q e;    S' = diag(decay) S + columns^T e.

So the errors are the solution of a triangular system, and its inverse is computed for all chunks at once. Only four
products depend on the previous chunk; queries and keys share one of them, since their rows are in one tensor.

Shapes: b batch, t tokens, h heads, d channels of a query and a key, e channels of a value, c tokens of a chunk,
n chunks, r heads of all sequences (b, h), m chunks of all heads (n, r), 2 a query and a key, x queries and keys (c, 2).
"""

from typing import Any

import torch
from torch import Tensor

from depthlm.ops.call import call
from depthlm.ops.dtypes import exact_dtype, no_autocast, upcast
from depthlm.ops.kimi_delta.chunks import backward as chunk_gradients
from depthlm.ops.kimi_delta.chunks import forward as chunk_parts
from depthlm.ops.kimi_delta.chunks import masks_of, merge, operands, split
from depthlm.ops.kimi_delta.naive import zero_state

# tokens of a chunk, a power of 2
CHUNK = 64
# values of the keys that are processed at a time on a CPU, few enough for its cache
PART = 2**19


def chunked(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    g_bthd: Tensor,
    beta_bth: Tensor,
    state_bhde: Tensor | None = None,
    starts_bt: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `recurrence`: o_bthe in the dtype of v, and the last state in fp32 or better."""
    state = zero_state(upcast(k_bthd), v_bthe) if state_bhde is None else state_bhde
    inputs = q_bthd, k_bthd, v_bthe, g_bthd, beta_bth, state
    step = max(1, PART // k_bthd[0].numel())
    if not k_bthd.is_cpu or len(k_bthd) <= step:
        return call(Chunked, *inputs, starts_bt)
    parts = list(zip(*(x.split(step) for x in inputs), strict=True))
    starts = [None] * len(parts) if starts_bt is None else starts_bt.split(step)
    results = [call(Chunked, *part, start) for part, start in zip(parts, starts, strict=True)]
    out_bthe, last_bhde = (torch.cat(xs) for xs in zip(*results, strict=True))
    return out_bthe, last_bhde


class Chunked(torch.autograd.Function):
    """Inputs, errors, and the states before the chunks are saved. The backward pass computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (b, t, h, d), e, dtype = q.shape, v.shape[3], exact_dtype((q, k, v, g, beta, state))
        c = min(CHUNK, 1 << (t - 1).bit_length())
        n, r = -(-t // c), b * h
        with no_autocast(q):
            inputs, masks = operands(q, k, g, beta, c, dtype), masks_of(starts, h, c)
            parts = chunk_parts(inputs, masks)
            scores = parts.scores_mc2c
            eye = torch.eye(c, dtype=dtype, device=q.device)
            inverse_mcc = torch.linalg.solve_triangular(scores[:, :, 1], eye, upper=False, unitriangular=True)
            by_chunk = *parts.factors(), inverse_mcc, split(v, c, dtype)
            rows, columns, decay, inverse, values = (x.unflatten(0, (n, r)) for x in by_chunk)
            errors, states = torch.empty_like(values), values.new_empty(n, r, d, e)
            # the part of each sum that the state contributes
            sums = values.new_empty(n, r, 2 * c, e)
            state_rde = state.to(dtype).flatten(0, 1)
            for i in range(n):
                states[i] = state_rde
                torch.bmm(rows[i], state_rde, out=sums[i])
                torch.bmm(inverse[i], values[i] - sums[i, :, 1::2], out=errors[i])
                state_rde = torch.baddbmm(state_rde * decay[i], columns[i].mT, errors[i])
            errors_mce = errors.flatten(0, 1)
            out_mce = torch.baddbmm(sums.flatten(0, 1)[:, ::2], scores[:, :, 0], errors_mce)
        ctx.save_for_backward(q, k, g, beta, starts, inverse_mcc, errors_mce, states)
        return merge(out_mce, b, t, v.dtype), state_rde.unflatten(0, (b, h))

    @staticmethod
    def backward(ctx: Any, grad_bthe: Tensor, grad_bhde: Tensor) -> tuple[Tensor | None, ...]:
        q, k, g, beta, starts, inverse_mcc, errors_mce, states = ctx.saved_tensors
        (b, t, h, _), (n, r, d, e), c, dtype = q.shape, states.shape, inverse_mcc.shape[1], states.dtype
        with no_autocast(q):
            inputs, masks = operands(q, k, g, beta, c, dtype), masks_of(starts, h, c)
            parts = chunk_parts(inputs, masks, keep_joins=True)
            # of the sums for o, and of those that are subtracted from v
            grad_sums = states.new_empty(n, r, c, 2, e)
            grad_sums[..., 0, :] = split(grad_bthe, c, dtype).unflatten(0, (n, r))
            grad_errors_mce = parts.scores_mc2c[:, :, 0].mT @ grad_sums[..., 0, :].flatten(0, 1)
            by_chunk = *parts.factors(), inverse_mcc, grad_errors_mce
            rows, columns, decay, inverse, grad_errors = (x.unflatten(0, (n, r)) for x in by_chunk)
            # of the states after the chunks
            grad_states, grad_rde = torch.empty_like(states), grad_bhde.to(dtype).flatten(0, 1)
            for i in reversed(range(n)):
                grad_states[i] = grad_rde
                grad_error = torch.baddbmm(grad_errors[i], columns[i], grad_rde)
                torch.neg(inverse[i].mT @ grad_error, out=grad_sums[i, :, :, 1])
                grad_rde = torch.baddbmm(grad_rde * decay[i], rows[i].mT, grad_sums[i].flatten(1, 2))
            sums_mxe = grad_sums.view(n * r, 2 * c, e)
            before_mde, after_mde = states.flatten(0, 1), grad_states.flatten(0, 1)
            grads = chunk_gradients(
                inputs,
                masks,
                parts,
                grad_scores=(sums_mxe @ errors_mce.mT).view(-1, c, 2, c),
                grad_rows=(sums_mxe @ before_mde.mT).view(-1, c, 2, d),
                grad_columns=errors_mce @ after_mde.mT,
                grad_decay=(before_mde * after_mde).sum(-1, keepdim=True),
            )
            grad_v = merge(-grad_sums[..., 1, :].flatten(0, 1), b, t, grad_bthe.dtype)
        grad_q, grad_k, grad_g, grad_beta = (
            merge(grad, b, t, x.dtype) for grad, x in zip(grads, (q, k, g, beta), strict=True)
        )
        return grad_q, grad_k, grad_v, grad_g, grad_beta[..., 0], grad_rde.unflatten(0, (b, h)), None
