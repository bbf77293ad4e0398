"""Attention over depth for several reads of the same sources (Attention Residuals, arXiv 2603.15031).

    score_sj = q_s . x_j / rms(x_j) + bias_j,    lse_s = log sum_j exp score_sj,
    out_s = sum_j exp(score_sj - lse_s) x_j

A read in two phases is exact (section 4.2): the (out, lse) over the old sources is the `start` of the read over the
newer ones. A start counts as one more source with score lse and value out.

This is the definition. Training runs cpu.py or triton.py beside it, and this code only with kernels=naive.

Shapes: s reads, n sources, p positions (any leading dimensions), d width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthlm.ops.attention_residuals.cpu import Start
from depthlm.ops.attention_residuals.cpu import depth_attend as cpu
from depthlm.ops.backend import operator


def _triton() -> Callable[..., Start]:
    from depthlm.ops.attention_residuals.triton import depth_attend

    return depth_attend


@operator("attention_residuals", triton=_triton, cpu=cpu)
def depth_attend(
    query_sd: Tensor,
    sources: Sequence[Tensor],
    eps: float | None,
    bias_n: Tensor | None = None,
    start: Start | None = None,
) -> Start:
    """Return (out_spd, lse_sp): out in the widest dtype of the sources and the start, lse in fp32 or better
    (this definition is for fp32 and fp64).

    sources: n tensors x_pd.
    eps: of the rms; None: keys are not normalized.
    start: out_spd and lse_sp of the same reads over other sources.
    """
    x_npd = torch.stack(list(sources))
    key_npd = x_npd if eps is None else x_npd / (x_npd.square().mean(-1, keepdim=True) + eps).sqrt()
    score_nps = key_npd @ query_sd.mT
    if bias_n is not None:
        score_nps = score_nps + bias_n.view(-1, *[1] * (score_nps.ndim - 1))
    score_nsp = score_nps.movedim(-1, 1)
    lse_sp = score_nsp.logsumexp(0)
    if start is not None:
        lse_sp = torch.logaddexp(lse_sp, start[1])
    out_spd = ((score_nsp - lse_sp).exp()[..., None] * x_npd[:, None]).sum(0)
    if start is not None:
        out_spd = out_spd + (start[1] - lse_sp).exp()[..., None] * start[0]
    return out_spd, lse_sp
