"""`weighted_reads` in PyTorch, chunk by chunk. Each source is loaded once for all reads.

It is 0.87 times as fast as the definition (benchmarks/kernels.py, fp32, forward and backward). It stays because it
keeps no copy of the sources for the backward pass: the definition stacks them for each read, 100 MiB for 25 sources of
2048 positions and width 512. One `weighted_sum` per read keeps no copy either, but all reads of a decoder (size 360m,
512 positions) take 1.5 to 1.8 times as long.

Shapes: s reads, n sources, p positions (any leading dimensions), c positions of a chunk, d width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthlm.ops.autograd import call, chunks, present, stack_sources
from depthlm.ops.dtypes import common_dtype, exact_dtype, no_autocast


def weighted_reads(weights_sn: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None = None) -> Tensor:
    return call(WeightedReads, weights_sn, start_spd, *sources)


class WeightedReads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_sn: Tensor, start_spd: Tensor | None, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights_sn, *sources)
        ctx.start = None if start_spd is None else start_spd.dtype
        dtype, reads, d = exact_dtype(sources), len(weights_sn), sources[0].shape[-1]
        sources_pd, weights = [x.reshape(-1, d) for x in sources], weights_sn.to(dtype)
        out_spd = weights_sn.new_empty(reads, len(sources_pd[0]), d, dtype=common_dtype(present(start_spd, *sources)))
        start = None if start_spd is None else start_spd.reshape(out_spd.shape)
        with no_autocast(weights_sn):
            for part in chunks(out_spd.shape[1], d, out_spd):
                out_scd = (weights @ stack_sources(sources_pd, part, dtype).flatten(1)).view(reads, -1, d)
                if start is None:
                    out_spd[:, part] = out_scd
                else:
                    torch.add(out_scd, start[:, part], out=out_spd[:, part])
        return out_spd.view(reads, *sources[0].shape)

    @staticmethod
    def backward(ctx: Any, grad_spd: Tensor) -> tuple[Tensor | None, ...]:
        weights_sn, *sources = ctx.saved_tensors
        dtype, reads, d = exact_dtype(sources), len(weights_sn), grad_spd.shape[-1]
        sources_pd, grads = [x.reshape(-1, d) for x in sources], grad_spd.reshape(reads, -1, d)
        grads_pd, weights = [torch.empty_like(x) for x in sources_pd], weights_sn.to(dtype)
        grad_weights = torch.zeros_like(weights)
        with no_autocast(weights_sn):
            for part in chunks(grads.shape[1], d, grads):
                grad = grads[:, part].to(dtype).flatten(1)
                grad_weights.addmm_(grad, stack_sources(sources_pd, part, dtype).flatten(1).mT)
                for grad_pd, row in zip(grads_pd, weights.mT @ grad, strict=True):
                    grad_pd[part] = row.view(-1, d)
        grad_start = None if ctx.start is None else grad_spd.to(ctx.start)
        shaped = (grad.view(x.shape) for grad, x in zip(grads_pd, sources, strict=True))
        return grad_weights.to(weights_sn.dtype), grad_start, *shaped
