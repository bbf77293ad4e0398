"""Kimi Delta Attention (arXiv 2510.26692) by chunks of tokens, with a hand-written backward pass.

A token i of a chunk corrects the error e_i of the state: S_i = diag(exp g_i) S_{i-1} + p_i e_i^T with p_i = beta_i k_i.
Let D_ij be the product of the decays of the tokens j + 1 to i, a vector of d channels, and D_i0 and D_cj those from the
beginning and to the end of the chunk. The rows of a chunk are q_i D_i0 and k_i D_i0, its columns p_j D_cj, its decay
D_c0, and its scores A (q_i D_ij)^T p_j for j <= i and (k_i D_ij)^T p_j for j < i. If S is the state before the chunk,

    e = v - rows_k S - A_k e;    o = rows_q S + A_q e;    S' = diag(decay) S + columns^T e.

So the errors are the solution of a triangular system, and its inverse is computed for all chunks at once. Only four
products depend on the previous chunk; queries and keys share one of them, since their rows are in one tensor.

D_ij is no quotient D_i0 / D_j0, which strong decays make 0 / 0. Instead, blocks of 1, 2, 4, ... tokens are joined in
pairs. A row is decayed from the beginning of its block, and a column to the end of its block, so their product is a
score if the row is in the second block and the column in the first one. To join the blocks, these rows and columns are
multiplied by the decay of the other block. All factors are at most 1.

On a CPU it is 1.5 to 1.8 times as fast as the same computation differentiated by autograd (fp32, one thread of a
two-core machine, forward and backward).

Shapes: b batch, t tokens, h heads, d channels of a query and a key, e channels of a value, c tokens of a chunk,
n chunks, r heads of all sequences (b, h), m chunks of all heads (n, r), 2 a query and a key, x queries and keys (c, 2).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthlm.ops.autograd import call
from depthlm.ops.dtypes import exact_dtype, no_autocast, upcast
from depthlm.ops.kimi_delta.naive import zero_state

# tokens of a chunk, a power of 2
CHUNK = 64
# values of the keys that are processed at a time on a CPU, few enough for its cache
PART = 2**19


class Operands(NamedTuple):
    """Queries, scaled, and keys; the logarithms of the decays; and beta."""

    x_mc2d: Tensor
    g_mcd: Tensor
    beta_mc1: Tensor

    def columns(self) -> Tensor:
        """Return p_mcd."""
        return self.x_mc2d[:, :, 1] * self.beta_mc1


class Masks(NamedTuple):
    """False for two tokens of different documents, and for a token and the state before, or after, its chunk."""

    pairs_mc1c: Tensor
    before_mc1: Tensor
    after_mc1: Tensor

    def apply(self, scores_mc2c: Tensor, rows_mc2d: Tensor, columns_mcd: Tensor) -> None:
        """Set to zero, in place, what combines two documents."""
        scores_mc2c.mul_(self.pairs_mc1c)
        rows_mc2d.mul_(self.before_mc1[..., None])
        columns_mcd.mul_(self.after_mc1)


class Join(NamedTuple):
    """Pairs of blocks that are joined: the factors of their scores, and the decays of both blocks."""

    rows: Tensor
    columns: Tensor
    decays: Tensor


class Chunks(NamedTuple):
    """What the tokens of each chunk contribute. joins is empty unless it is needed for a backward pass."""

    scores_mc2c: Tensor
    rows_mc2d: Tensor
    columns_mcd: Tensor
    decay_md1: Tensor
    joins: list[Join]

    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors of products with a state: rows_mxd, x queries and keys (c, 2); columns_mcd; decay_md1."""
        return self.rows_mc2d.flatten(1, 2), self.columns_mcd, self.decay_md1


def operands(q_bthd: Tensor, k_bthd: Tensor, g_bthd: Tensor, beta_bth: Tensor, c: int, dtype: torch.dtype) -> Operands:
    """Arrange the inputs by chunk."""
    q_mcd, k_mcd, g_mcd, beta_mc1 = (split(x, c, dtype) for x in (q_bthd, k_bthd, g_bthd, beta_bth[..., None]))
    return Operands(torch.stack((q_mcd * q_bthd.shape[3] ** -0.5, k_mcd), dim=2), g_mcd, beta_mc1)


def masks_of(starts_bt: Tensor | None, heads: int, c: int) -> Masks | None:
    """Return the masks of documents that begin at these tokens."""
    if starts_bt is None:
        return None
    starts_mc1 = split(starts_bt[:, :, None, None].expand(-1, -1, heads, 1), c, torch.int32)
    index_mc1 = starts_mc1.cumsum(1)
    return Masks((index_mc1 == index_mc1.mT)[:, :, None], index_mc1 == 0, index_mc1 == index_mc1[:, -1:])


def chunk_parts(inputs: Operands, masks: Masks | None, keep_joins: bool = False) -> Chunks:
    m, c, _, d = inputs.x_mc2d.shape
    joins = []
    scores, columns = inputs.x_mc2d.new_zeros(m, c, 2, c), inputs.columns()
    _diagonal(scores).copy_((inputs.x_mc2d[:, :, 0] * columns).sum(-1))
    decay = inputs.g_mcd.exp()
    rows = inputs.x_mc2d * decay[:, :, None]
    for size in _sizes(c):
        second, first, decays = *_pairs(rows, columns, size), decay.view(-1, 2, 1, d)
        blocks = _blocks(scores, size)
        blocks.copy_((second @ first.mT).view(blocks.shape))
        if keep_joins:
            joins.append(Join(second.clone(), first.clone(), decays))
        second.mul_(decays[:, 0])
        first.mul_(decays[:, 1])
        decay = decays[:, 0] * decays[:, 1]
    decay = decay.view(m, d, 1)
    if masks is not None:
        masks.apply(scores, rows, columns)
        decay = decay * masks.before_mc1[:, -1:]
    return Chunks(scores, rows, columns, decay, joins)


def chunk_gradients(
    inputs: Operands,
    masks: Masks | None,
    chunks: Chunks,
    grad_scores: Tensor,
    grad_rows: Tensor,
    grad_columns: Tensor,
    grad_decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q_mcd, k_mcd, g_mcd and beta_mc1. Those of the chunks are overwritten.

    A row is proportional to the exponential of the sum of g up to its token, and a column to that of the negative sum.
    So the gradient of such a sum needs no gradients of decays, but the rows, the columns, and their own gradients. If
    decays are so strong that the gradient of g vanishes, the rounding of these products remains.
    """
    c, d = inputs.x_mc2d.shape[1::2]
    if masks is not None:
        masks.apply(grad_scores, grad_rows, grad_columns)
    grad_end_md = (grad_decay * chunks.decay_md1)[..., 0] + (grad_columns * chunks.columns_mcd).sum(1)
    for size, join in zip(reversed(_sizes(c)), reversed(chunks.joins), strict=True):
        blocks = _blocks(grad_scores, size).reshape(-1, 2 * size, size)
        second, first = _pairs(grad_rows, grad_columns, size)
        second.mul_(join.decays[:, 0]).add_(blocks @ join.columns)
        first.mul_(join.decays[:, 1]).add_(blocks.mT @ join.rows)
    grad_rows.mul_(inputs.g_mcd.exp()[:, :, None])
    (q, k), columns = inputs.x_mc2d.unbind(2), inputs.columns()
    grad_sum = (grad_rows * inputs.x_mc2d).sum(2).addcmul_(grad_columns, columns, value=-1)
    grad_sum[:, -1] += grad_end_md
    grad_g = grad_sum.new_ones(c, c).triu_() @ grad_sum
    diagonal = _diagonal(grad_scores)[..., None]
    grad_q, grad_k = grad_rows.unbind(2)
    grad_q = grad_q.addcmul(diagonal, columns).mul_(d**-0.5)
    grad_columns.addcmul_(diagonal, q)
    return grad_q, grad_k.addcmul(grad_columns, inputs.beta_mc1), grad_g, (grad_columns * k).sum(-1, keepdim=True)


def split(x_bthd: Tensor, c: int, dtype: torch.dtype) -> Tensor:
    """Return x_mcd by chunk, contiguous, padded with zeros to complete chunks."""
    missing = -x_bthd.shape[1] % c
    x = F.pad(x_bthd, (0, 0, 0, 0, 0, missing)) if missing else x_bthd
    return x.to(dtype).unflatten(1, (-1, c)).permute(1, 0, 3, 2, 4).flatten(0, 2).contiguous()


def merge(x_mcd: Tensor, b: int, t: int, dtype: torch.dtype) -> Tensor:
    """Return x_bthd from chunks, without the padding."""
    n = -(-t // x_mcd.shape[1])
    return x_mcd.unflatten(0, (n, b, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :t].to(dtype)


def _sizes(c: int) -> list[int]:
    """Return the sizes of the blocks that are joined, up to half a chunk."""
    return [1 << i for i in range(c.bit_length() - 1)]


def _pairs(rows_mc2d: Tensor, columns_mcd: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of the rows of the second block, and of the columns of the first block, of each pair of blocks."""
    d = rows_mc2d.shape[3]
    return rows_mc2d.view(-1, 2, 2 * size, d)[:, 1], columns_mcd.view(-1, 2, size, d)[:, 0]


def _blocks(scores_mc2c: Tensor, size: int) -> Tensor:
    """Return a view of the scores of these rows and columns: chunk, pair, row, query and key, column."""
    pairs = scores_mc2c.shape[1] // (2 * size)
    blocks = scores_mc2c.view(-1, pairs, 2, size, 2, pairs, 2, size)[:, :, 1, :, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=4).movedim(-1, 1)


def _diagonal(scores_mc2c: Tensor) -> Tensor:
    """Return a view of the scores of queries and the columns of the same token."""
    return scores_mc2c[:, :, 0].diagonal(dim1=1, dim2=2)


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
