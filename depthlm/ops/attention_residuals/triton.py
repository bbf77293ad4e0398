"""`depth_attend` in Triton. Each launch takes all sources, and up to MAX_READS reads.

One read of at most ADDRESSES sources has its own kernels.

Shapes: s reads, n sources, p positions, d width.
"""

from collections.abc import Sequence

from torch import Tensor

from depthlm.ops.attention_residuals.many_triton import forward as attend_many
from depthlm.ops.attention_residuals.one_triton import forward as attend_one
from depthlm.ops.backend import expect
from depthlm.ops.reads_triton import ADDRESSES, check_reads, in_groups, joined, of_group, one_narrow_dtype, widest
from depthlm.ops.source_sums import tokens_of


def attend(
    query_sd: Tensor,
    sources: Sequence[Tensor],
    eps: float | None,
    bias_n: Tensor | None = None,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `depth_attend`. Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype."""
    reads, shape = len(query_sd), sources[0].shape
    expect("attention_residuals", query_sd, query=(query_sd, (reads, shape[-1])))
    check_reads("attention_residuals", query_sd, sources, start[0] if start else None)
    if bias_n is not None:
        expect("attention_residuals", query_sd, bias=(bias_n, (len(sources),)))
    out_spd, lse_sp = start or (None, None)
    if lse_sp is not None:
        expect("attention_residuals", query_sd, **{"start of lse": (lse_sp, (reads, *shape[:-1]))})
    dtype, xs = widest(sources, out_spd), one_narrow_dtype(sources)
    tokens = tokens_of(xs)
    if reads == 1 and len(xs) <= ADDRESSES:
        starts = (None if x is None else x.squeeze(0) for x in (out_spd, lse_sp))
        out, lse = attend_one(query_sd.squeeze(0), xs, eps, bias_n, *starts, dtype, tokens)
        return out[None], lse[None]
    parts = []
    for group in in_groups(reads):
        starts = (None if x is None else of_group(x, group) for x in (out_spd, lse_sp))
        parts.append(attend_many(of_group(query_sd, group), xs, eps, bias_n, *starts, dtype, tokens)[:2])
    return joined([out for out, _ in parts]), joined([lse for _, lse in parts])
