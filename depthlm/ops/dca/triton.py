"""`weighted_reads` and `gated_reads` in Triton. Each launch takes all sources, and up to MAX_READS reads.

Shapes: s reads, n sources, p positions, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.dca.gated_triton import forward as gated_forward
from depthlm.ops.dca.weighted_triton import forward as weighted_forward
from depthlm.ops.reads_triton import in_groups, of_group, one_narrow_dtype, widest
from depthlm.ops.source_sums import tokens_of


def weighted(weights_sn: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None) -> Tensor:
    """Run `weighted_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    expect("depth_sums", weights_sn, weights=(weights_sn, (len(weights_sn), len(sources))))
    _check(weights_sn, sources, start_spd)
    dtype, xs = widest(sources, start_spd), one_narrow_dtype(sources)
    tokens = tokens_of(xs)
    return _joined(
        [
            weighted_forward(
                of_group(weights_sn, group),
                xs,
                None if start_spd is None else of_group(start_spd, group),
                dtype,
                tokens,
            )
            for group in in_groups(len(weights_sn))
        ]
    )


def gated(bias_snd: Tensor, gate_snd: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None) -> Tensor:
    """Run `gated_reads`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    shape = (len(bias_snd), len(sources), sources[0].shape[-1])
    expect("depth_sums", bias_snd, bias=(bias_snd, shape), gate=(gate_snd, shape))
    _check(bias_snd, sources, start_spd)
    dtype, xs = widest(sources, start_spd), one_narrow_dtype(sources)
    outputs, tokens = [], tokens_of(xs)
    for group in in_groups(len(bias_snd)):
        bias, gate = (of_group(x, group) for x in (bias_snd, gate_snd))
        start = None if start_spd is None else of_group(start_spd, group)
        outputs.append(gated_forward(bias, gate, xs, start, dtype, tokens)[0])
    return _joined(outputs)


def _check(weights: Tensor, sources: Sequence[Tensor], start_spd: Tensor | None) -> None:
    shape = sources[0].shape
    expect("depth_sums", weights, **{f"source {j}": (x, shape) for j, x in enumerate(sources)})
    if start_spd is not None:
        expect("depth_sums", weights, start=(start_spd, (len(weights), *shape)))


def _joined(outputs: list[Tensor]) -> Tensor:
    """Return the outputs of the groups of reads as one tensor."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
