"""The same work by our operators and by those of Liger-Kernel, flash-linear-attention (fla) and the authors of MoDA.

`attention_residuals`: the eight reads of a phase. The first has `SOURCES` sources; each of the others has one more, the
running sum of its block. We read the sources once for all eight; the peers have one call per read, and Liger's takes
the sources as one tensor, which has to be stacked for each read, since the running sum is another one.

`mhc`: the write of one sublayer and the read of the next one. Liger has an operator for each of its three parts.

`moda`: attention over the sequence and over depth entries, which each side keeps in its own layout before it is timed.

Shapes: b batch, t tokens, d hidden size, n streams or depth entries, m = n (n + 2), k key/value heads, g query heads of
each of them, e head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.mhc.cpu import Parameters, Pending
from depthlm.ops.mhc.naive import mhc_post_pre
from depthlm.ops.moda.bank import depth_of
from depthlm.ops.moda.merge import merged_attention

EPS, READS, SOURCES, STREAMS, ITERATIONS = 1e-6, 8, 5, 4, 20
# of moda: head size, query heads per key/value head, depth entries; the smaller ones for a tiny hidden size
HEAD_SIZE, GROUPS, ENTRIES = 64, 4, 48
TINY_HEAD_SIZE, TINY_ENTRIES = 16, 3
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


def moda(make: Callable[..., Tensor], b: int, t: int, d: int) -> Case:
    e, n = (HEAD_SIZE, ENTRIES) if d >= GROUPS * HEAD_SIZE else (TINY_HEAD_SIZE, TINY_ENTRIES)
    heads = max(1, d // e // GROUPS)
    q_btkge, k_btke, v_btke = make(b, t, heads, GROUPS, e), make(b, t, heads, e), make(b, t, heads, e)
    entries = [make(b, t, heads, e) for _ in range(2 * n)]
    depth = depth_of([(k.transpose(1, 2), v.transpose(1, 2)) for k, v in zip(entries[:n], entries[n:], strict=True)])

    def ours() -> list[Tensor]:
        q_bhte = q_btkge.flatten(2, 3).transpose(1, 2)
        attended_bhte = merged_attention(q_bhte, k_btke.transpose(1, 2), v_btke.transpose(1, 2), depth)
        return [attended_bhte.transpose(1, 2)]

    # they take the queries of a group as positions of one head, and the entries of a position one after the other
    cached = [torch.stack(x, dim=2).flatten(1, 2) for x in (entries[:n], entries[n:])]

    def theirs(attend: Callable[..., Tensor]) -> list[Tensor]:
        folded = q_btkge.transpose(2, 3).flatten(1, 2)
        context = attend(folded, k_btke, v_btke, *cached)
        return [context.unflatten(1, (t, GROUPS)).transpose(2, 3).flatten(2, 3)]

    def kernel(q: Tensor, k: Tensor, v: Tensor, depth_k: Tensor, depth_v: Tensor) -> Tensor:
        from fla.ops.moda import parallel_moda

        settings = {"moda_group_num": GROUPS, "warn_shape": False}
        return parallel_moda(q, k, v, cached_k=depth_k, cached_v=depth_v, **settings)

    def definition(q: Tensor, k: Tensor, v: Tensor, depth_k: Tensor, depth_v: Tensor) -> Tensor:
        """The authors' own definition, since their kernels ask for the name of a GPU."""
        from fla.ops.moda import naive_mixture_of_depth_causal_ref

        return naive_mixture_of_depth_causal_ref(q, k, v, depth_k, depth_v, moda_group_num=GROUPS)[0]

    runs: dict[str, Run] = {"ours": ours, "moda": lambda: theirs(kernel)}
    return Case([q_btkge, k_btke, v_btke, *entries], runs, {"moda": lambda: theirs(definition)})


OPERATORS: dict[str, Callable[..., Case]] = {"attention_residuals": attention_residuals, "mhc": mhc, "moda": moda}
