"""Sums over depth with gates of each dimension, for several reads of the same sources (arXiv 2502.06785, GRN-v3).

A sum in two phases is exact: the result over the old sources is the `start` of the sum over the newer ones.

This is the definition. Training runs cpu.py or triton.py beside it, and this code only with kernels=naive.

Shapes: s reads, n sources, p positions (any leading dimensions), d width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import operator
from depthlm.ops.dca.cpu import gated_reads as cpu


def _triton() -> Callable[..., Tensor]:
    from depthlm.ops.dca.triton import gated

    return gated


@operator("dca", triton=_triton, cpu=cpu)
def gated_reads(b_snd: Tensor, w_snd: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    """Return out_spd = start_s + sum_j relu(b[s, j] + w[s, j] . sources[j]) * sources[j].

    The gate relu(b + w . x) has a bias b for each dimension. sources: n tensors x_pd. The result has the widest dtype
    of sources and start.
    """
    reads = []
    for b_nd, w_nd in zip(b_snd, w_snd, strict=True):
        triples = zip(b_nd, w_nd, sources, strict=True)
        reads.append(sum((b_d + x_pd @ w_d[:, None]).relu() * x_pd for b_d, w_d, x_pd in triples))
    out_spd = torch.stack(reads)
    return out_spd if start_spd is None else start_spd + out_spd
