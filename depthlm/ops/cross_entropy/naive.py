"""The head of a decoder and its loss, with all logits in memory.

    logits = h W^T + b;    logsumexp_r = log sum_v exp logits_rv;    nll_r = logsumexp_r - logits_r(target)

Shapes: r rows (tokens of all sequences), d hidden size, v vocabulary.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from depthlm.ops.dtypes import upcast


class Rows(NamedTuple):
    """The numbers of each row that the gradient of its logits depends on."""

    targets: Tensor
    logsumexp: Tensor
    grad_nll: Tensor
    grad_logsumexp: Tensor


def linear_cross_entropy(
    hidden_rd: Tensor, weight_vd: Tensor, bias_v: Tensor | None, targets_r: Tensor
) -> tuple[Tensor, Tensor]:
    """Return nll_r and logsumexp_r of the logits."""
    return cross_entropy(F.linear(hidden_rd, weight_vd, bias_v), targets_r)


def cross_entropy(logits_rv: Tensor, targets_r: Tensor) -> tuple[Tensor, Tensor]:
    """Return nll_r and logsumexp_r in fp32 or better. The nll of a target of -100 is undefined."""
    logits_rv = upcast(logits_rv)
    logsumexp_r = logits_rv.logsumexp(1)
    return logsumexp_r - logits_rv.gather(1, targets_r.clamp(min=0)[:, None])[:, 0], logsumexp_r
