"""Weighted sums over depth for several reads of the same sources (DenseFormer, arXiv 2402.02622).

A sum in two phases is exact: the result over the old sources is the `start` of the sum over the newer ones.

This is the definition. Training runs cpu.py or triton.py beside it, and this code only with kernels=naive.

Shapes: s reads, n sources, p positions (any leading dimensions), d width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import operator
from depthlm.ops.denseformer.cpu import weighted_reads as cpu


def _triton() -> Callable[..., Tensor]:
    from depthlm.ops.denseformer.triton import weighted

    return weighted


@operator("denseformer", triton=_triton, cpu=cpu)
def weighted_reads(weights_sn: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Return out_spd = start_s + sum_j weights[s, j] * sources[j], in the widest dtype of sources and start.

    sources: n tensors x_pd.
    """
    out_spd = torch.einsum("sn,n...d->s...d", weights_sn, torch.stack(list(sources)))
    return out_spd if start_spd is None else start_spd + out_spd
