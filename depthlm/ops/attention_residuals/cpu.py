"""`depth_attend` in PyTorch, chunk by chunk. Each source is loaded once for all reads.

On a CPU, 8 reads are 7 to 12 times as fast as the definition (benchmarks/kernels.py, fp32, forward and backward).

Shapes: s reads, n sources, p positions (any leading dimensions), c positions of a chunk, d width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthlm.ops.autograd import call, chunks, present, stack_sources
from depthlm.ops.dtypes import common_dtype, exact_dtype, no_autocast

Start = tuple[Tensor, Tensor]


def depth_attend(
    query_sd: Tensor,
    sources: Sequence[Tensor],
    eps: float | None,
    bias_n: Tensor | None = None,
    start: Start | None = None,
) -> Start:
    return call(DepthAttend, query_sd, eps, bias_n, *(start or (None, None)), *sources)


class DepthAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_sd: Tensor,
        eps: float | None,
        bias_n: Tensor | None,
        start_spd: Tensor | None,
        start_sp: Tensor | None,
        *sources: Tensor,
    ) -> Start:
        dtype, (reads, d) = exact_dtype(present(start_spd, *sources)), query_sd.shape
        sources_pd = [x.reshape(-1, d) for x in sources]
        positions = len(sources_pd[0])
        out_spd = query_sd.new_empty(reads, positions, d, dtype=common_dtype(present(start_spd, *sources)))
        lse_ps, scores_pns = (
            query_sd.new_empty(positions, *shape, dtype=dtype) for shape in ((reads,), (len(sources), reads))
        )
        scale_pn = None if eps is None else query_sd.new_empty(positions, len(sources), dtype=dtype)
        start = _flat(start_spd, start_sp, dtype)
        with no_autocast(query_sd):
            for part in chunks(positions, d, query_sd):
                x_cnd = stack_sources(sources_pd, part, dtype, dim=1)
                scores_cns = scores_pns[part]
                torch.matmul(x_cnd, query_sd.to(dtype).mT, out=scores_cns)
                if scale_pn is not None:
                    norm_cn = torch.linalg.vector_norm(x_cnd, dim=-1)
                    scale_pn[part] = norm_cn.square_().div_(d).add_(eps).rsqrt_()
                    scores_cns.mul_(scale_pn[part][..., None])
                biased = scores_cns if bias_n is None else scores_cns + bias_n[:, None]
                lse_cs = biased.logsumexp(1)
                if start is not None:
                    lse_cs = torch.logaddexp(lse_cs, start[1][part])
                out_csd = (biased - lse_cs[:, None]).exp_().mT @ x_cnd
                if start is not None:
                    share_cs = (start[1][part] - lse_cs).exp_()
                    out_csd.addcmul_(share_cs[..., None], start[0][:, part].transpose(0, 1))
                out_spd[:, part] = out_csd.transpose(0, 1)
                lse_ps[part] = lse_cs
        ctx.save_for_backward(query_sd, bias_n, start_spd, start_sp, scores_pns, scale_pn, lse_ps, *sources)
        shape = sources[0].shape[:-1]
        return out_spd.view(reads, *shape, d), lse_ps.mT.view(reads, *shape)

    @staticmethod
    def backward(ctx: Any, grad_spd: Tensor, grad_sp: Tensor) -> tuple[Tensor | None, ...]:
        query_sd, bias_n, start_spd, start_sp, scores_pns, scale_pn, lse_ps, *sources = ctx.saved_tensors
        dtype, (reads, d) = lse_ps.dtype, query_sd.shape
        query = query_sd.to(dtype)
        sources_pd = [x.reshape(-1, d) for x in sources]
        grads_pd = [torch.empty_like(x) for x in sources_pd]
        grad_spd, grad_ps = grad_spd.reshape(reads, -1, d), grad_sp.reshape(reads, -1).mT
        grad_query, grad_bias = torch.zeros_like(query), query.new_zeros(len(sources))
        start = _flat(start_spd, start_sp, dtype)
        if start is not None:
            grad_start_spd, grad_start_ps = torch.empty_like(start[0]), torch.empty_like(start[1])
        with no_autocast(query_sd):
            for part in chunks(len(lse_ps), d, query_sd):
                x_cnd = stack_sources(sources_pd, part, dtype, dim=1)
                grad_csd = grad_spd[:, part].transpose(0, 1).to(dtype, memory_format=torch.contiguous_format)
                lse_cs, scores_cns = lse_ps[part], scores_pns[part]
                biased = scores_cns if bias_n is None else scores_cns + bias_n[:, None]
                weight_cns = (biased - lse_cs[:, None]).exp_()
                grad_weight_cns = x_cnd @ grad_csd.mT
                # the gradient of score j is weight_j * (grad_weight_j - common), where common is the sum of
                # weight_j * grad_weight_j over the sources and the start, less the gradient of lse
                common_cs = (weight_cns * grad_weight_cns).sum(1)
                if start is not None:
                    value_csd = start[0][:, part].transpose(0, 1)
                    share_cs = (start[1][part] - lse_cs).exp_()
                    grad_share_cs = (grad_csd * value_csd).sum(-1)
                    common_cs.addcmul_(share_cs, grad_share_cs)
                common_cs -= grad_ps[part]
                if start is not None:
                    grad_start_ps[part] = (grad_share_cs - common_cs).mul_(share_cs)
                    grad_start_spd[:, part] = (share_cs[..., None] * grad_csd).transpose(0, 1)
                grad_score_cns = grad_weight_cns.sub_(common_cs[:, None]).mul_(weight_cns)
                grad_bias += grad_score_cns.sum((0, 2))
                grad_x_cnd = weight_cns @ grad_csd
                if scale_pn is not None:
                    scale_cn = scale_pn[part]
                    grad_score_cns.mul_(scale_cn[..., None])
                    # the gradient of rms(x) is parallel to x
                    along_cn = (grad_score_cns * scores_cns).sum(-1).mul_(scale_cn).div_(-d)
                    grad_x_cnd.addcmul_(x_cnd, along_cn[..., None])
                grad_x_cnd.flatten(0, 1).addmm_(grad_score_cns.flatten(0, 1), query)
                grad_query.addmm_(grad_score_cns.flatten(0, 1).mT, x_cnd.flatten(0, 1))
                for grad_pd, grad_cd in zip(grads_pd, grad_x_cnd.unbind(1), strict=True):
                    grad_pd[part] = grad_cd
        grads = [grad.view(x.shape) for grad, x in zip(grads_pd, sources, strict=True)]
        grad_bias_n = None if bias_n is None else grad_bias.to(bias_n.dtype)
        if start is None:
            return grad_query.to(query_sd.dtype), None, grad_bias_n, None, None, *grads
        grad_start = grad_start_spd.to(start_spd.dtype).view(start_spd.shape), grad_start_ps.mT.view(start_sp.shape)
        return grad_query.to(query_sd.dtype), None, grad_bias_n, *grad_start, *grads


def _flat(start_spd: Tensor | None, start_sp: Tensor | None, dtype: torch.dtype) -> Start | None:
    """Return start_spd and start_ps with one dimension of positions."""
    if start_spd is None or start_sp is None:
        return None
    return start_spd.reshape(len(start_spd), -1, start_spd.shape[-1]), start_sp.reshape(len(start_sp), -1).mT.to(dtype)
