"""Operators on n parallel residual streams.

Shapes: b batch, t tokens, n streams, i new stream, j old stream, d hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from depthlm.model.functions import upcast


def read_streams(pre_btn: Tensor, streams_btnd: Tensor) -> Tensor:
    """H_pre X: sum_j pre[j] * X_j as x_btd, in the type of X."""
    return ReadStreams.apply(pre_btn, streams_btnd)


def mix_streams(res_btij: Tensor, streams_btnd: Tensor, post_btn: Tensor, output_btd: Tensor) -> Tensor:
    """H_res X + H_post^T y: sum_j res[i, j] * X_j + post[i] * y for each new stream i, in the type of X."""
    return MixStreams.apply(res_btij, streams_btnd, post_btn, output_btd)


def sinkhorn(logits_btij: Tensor, iterations: int) -> Tensor:
    """exp(logits) scaled to rows and columns that sum to 1 (Sinkhorn and Knopp, 1967), in fp32 or better.

    Each iteration divides the columns by their sums, then the rows, so the rows are exact and the columns nearly.
    """
    return Sinkhorn.apply(upcast(logits_btij), iterations)


class ReadStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre_btn: Tensor, streams_btnd: Tensor) -> Tensor:
        ctx.save_for_backward(pre_btn, streams_btnd)
        return _matmul(pre_btn[..., None, :], streams_btnd)[..., 0, :].to(streams_btnd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_btd: Tensor) -> tuple[Tensor, Tensor]:
        pre_btn, streams_btnd = ctx.saved_tensors
        grad_pre = _matmul(streams_btnd, grad_btd[..., None])[..., 0]
        grad_streams = pre_btn[..., None].to(grad_btd.dtype) * grad_btd[..., None, :]
        return grad_pre.to(pre_btn.dtype), grad_streams.to(streams_btnd.dtype)


class MixStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, res_btij: Tensor, streams_btnd: Tensor, post_btn: Tensor, output_btd: Tensor) -> Tensor:
        ctx.save_for_backward(res_btij, streams_btnd, post_btn, output_btd)
        mixed = _matmul(res_btij, streams_btnd)
        mixed.addcmul_(post_btn[..., None], output_btd[..., None, :])
        return mixed.to(streams_btnd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_btnd: Tensor) -> tuple[Tensor, ...]:
        res_btij, streams_btnd, post_btn, output_btd = ctx.saved_tensors
        grad_res = _matmul(grad_btnd, streams_btnd.mT)
        grad_streams = _matmul(res_btij.mT, grad_btnd)
        grad_post = _matmul(grad_btnd, output_btd[..., None])[..., 0]
        grad_output = _matmul(post_btn[..., None, :], grad_btnd)[..., 0, :]
        return (
            grad_res.to(res_btij.dtype),
            grad_streams.to(streams_btnd.dtype),
            grad_post.to(post_btn.dtype),
            grad_output.to(output_btd.dtype),
        )


class Sinkhorn(torch.autograd.Function):
    """Keeps the result and the sums, from which the backward pass recovers every iteration."""

    @staticmethod
    def forward(ctx: Any, logits_btij: Tensor, iterations: int) -> Tensor:
        # tokens last: sums over a dimension of n = 4 are then sums of whole vectors
        m_ijbt = logits_btij.permute(2, 3, 0, 1).contiguous()
        m_ijbt = m_ijbt.sub_(m_ijbt.amax(0, keepdim=True)).exp_()
        sums = []
        for _ in range(iterations):
            for dim in (0, 1):
                sums.append(m_ijbt.sum(dim, keepdim=True))
                m_ijbt.div_(sums[-1])
        ctx.save_for_backward(m_ijbt, *sums)
        return m_ijbt.permute(2, 3, 0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_btij: Tensor) -> tuple[Tensor, None]:
        result_ijbt, *sums = ctx.saved_tensors
        m, grad = result_ijbt.clone(), grad_btij.permute(2, 3, 0, 1).contiguous()
        for k in reversed(range(len(sums))):
            # m = before / s:  d before = (grad - sum(grad * m)) / s
            grad.sub_((grad * m).sum(k % 2, keepdim=True)).div_(sums[k])
            m.mul_(sums[k])
        return (grad * m).permute(2, 3, 0, 1).contiguous(), None


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of small matrices in fp32 or better, outside autocast: a mixing map in 16 bits would scale the streams."""
    with torch.autocast(a.device.type, enabled=False):
        kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        return a.to(kind) @ b.to(kind)
