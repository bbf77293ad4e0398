"""What the tokens of a chunk contribute to a delta attention, without values and states (see chunked.py).

Let D_ij be the product of the decays of the tokens j + 1 to i, a vector of d channels, and D_i0 and D_cj those from the
beginning and to the end of the chunk. With p_j = beta_j k_j, the rows of a chunk are q_i D_i0 and k_i D_i0, its columns
p_j D_cj, its decay D_c0, and its scores (q_i D_ij)^T p_j for j <= i and (k_i D_ij)^T p_j for j < i.

D_ij is no quotient D_i0 / D_j0, which strong decays make 0 / 0. Instead, blocks of 1, 2, 4, ... tokens are joined in
pairs. A row is decayed from the beginning of its block, and a column to the end of its block, so their product is a
score if the row is in the second block and the column in the first one. To join the blocks, these rows and columns are
multiplied by the decay of the other block. All factors are at most 1.

Shapes: b batch, t tokens, h heads, d channels of a query and a key, c tokens of a chunk, m chunks of all heads, in the
order of chunks, batch and heads, 2 a query and a key.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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


def forward(inputs: Operands, masks: Masks | None, keep_joins: bool = False) -> Chunks:
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


def backward(
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
