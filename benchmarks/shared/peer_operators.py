"""The same work by our operators and by those of Liger-Kernel and flash-linear-attention (fla).

`attention_residuals`: the eight reads of a phase. The first has `SOURCES` sources; each of the others has one more, the
running sum of its block. We read the sources once for all eight; the peers have one call per read, and Liger's takes
the sources as one tensor, which has to be stacked for each read, since the running sum is another one.

`mhc`: the write of one sublayer and the read of the next one. Liger has an operator for each of its three parts.

Shapes: b batch, t tokens, d hidden size, n streams, m = n (n + 2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.mhc.cpu import Parameters, Pending
from depthlm.ops.mhc.naive import mhc_post_pre

EPS, READS, SOURCES, STREAMS, ITERATIONS = 1e-6, 8, 5, 4, 20
Run = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """An operator: its inputs, which need gradients, and how each implementation computes its outputs.

    interpreted: runs that differ in Triton's interpreter.
    """

    inputs: list[Tensor]
    runs: dict[str, Run]
    interpreted: dict[str, Run] = field(default_factory=dict)


def attention_residuals(make: Callable[..., Tensor], b: int, t: int, d: int) -> Case:
    """make(*shape): a tensor of the streams' dtype; make(*shape, scale=x): one with values of this size."""
    sources = [make(b, t, d) for _ in range(SOURCES)]
    sums = [make(b, t, d) for _ in range(READS - 1)]
    queries, norms = ([make(d, scale=d**-0.5) for _ in range(READS)] for _ in range(2))

    def ours() -> list[Tensor]:
        query_sd = torch.stack(queries) * torch.stack(norms)
        out_sbtd, lse_sbt = depth_attend(query_sd, sources, EPS)
        first, *later = zip(query_sd, out_sbtd, lse_sbt, strict=True)
        outputs = [first[1]]
        for newest, (query, out, lse) in zip(sums, later, strict=True):
            outputs.append(depth_attend(query[None], [newest], EPS, None, (out[None], lse[None]))[0][0])
        return outputs

    def sources_of(read: int) -> list[Tensor]:
        return [*sources, *sums[read - 1 : read]] if read else sources

    def liger() -> list[Tensor]:
        from liger_kernel.ops.attn_res import LigerAttnResFunction

        return [
            LigerAttnResFunction.apply(torch.stack(sources_of(read)), queries[read], norms[read], EPS)
            for read in range(READS)
        ]

    def fla() -> list[Tensor]:
        from fla.ops.attnres import fused_attnres

        return [
            fused_attnres(queries[read], sources_of(read), norms[read], None, EPS, 1.0, False, 1)
            for read in range(READS)
        ]

    def fla_reference() -> list[Tensor]:
        """fla's own definition of its operator: the interpreter refuses its kernels, for converting a loop counter."""
        from fla.ops.attnres import naive_attnres

        return [naive_attnres(queries[read], sources_of(read), norms[read], None, EPS) for read in range(READS)]

    runs = {"ours": ours, "liger": liger, "fla": fla}
    return Case([*sources, *sums, *queries, *norms], runs, {"fla": fla_reference})


def mhc(make: Callable[..., Tensor], b: int, t: int, d: int) -> Case:
    n = STREAMS
    widths, exact = (n, n, n * n), {"dtype": torch.float32}
    x, y = make(b, t, n, d), make(b, t, d)
    post, res = make(b, t, n, **exact), make(b, t, n, n, **exact)
    phi = make(sum(widths), n * d, scale=(n * d) ** -0.5)
    alpha, bias = make(3, **exact), make(sum(widths), **exact)
    norm = torch.ones_like(phi[0])

    def ours() -> list[Tensor]:
        return list(mhc_post_pre(x, Pending(y, post, res), Parameters(phi, norm, alpha, bias), EPS, ITERATIONS))

    def liger() -> list[Tensor]:
        from liger_kernel.ops.mhc import LigerMHCCoeffsFunction, LigerMHCPostResFunction, LigerMHCPreFunction

        new = LigerMHCPostResFunction.apply(x, y, post, res)
        # allow_fp32, iterations, and the epsilons of the norm, of H_pre and of Sinkhorn-Knopp; H_post = 2 sigmoid
        settings = True, ITERATIONS, EPS, 0.0, 0.0, 2.0
        pre, new_post, new_res = LigerMHCCoeffsFunction.apply(
            new, phi.mT.contiguous(), bias, *alpha.unbind(), *settings
        )
        return [LigerMHCPreFunction.apply(new, pre), new, new_post, new_res]

    return Case([x, y, post, res, phi, alpha, bias], {"ours": ours, "liger": liger})


OPERATORS: dict[str, Callable[..., Case]] = {"attention_residuals": attention_residuals, "mhc": mhc}
