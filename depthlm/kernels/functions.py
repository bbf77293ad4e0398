"""Norm and loss with backward passes written out, fewer passes over memory than PyTorch's in eager mode, and the
product of a matrix and one row.

Where torch.compile traces, and for RMSNorm on a GPU or without a gradient, PyTorch's own are as fast or faster and are
used instead.

Shapes: d width of a norm, r rows (tokens of all sequences), v vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from depthlm.kernels.call import call
from depthlm.kernels.dtypes import upcast

# logits in fp32 at a time: few enough to stay in a CPU's cache; on a GPU, enough to fill it
CHUNK = 2**20
GPU_CHUNK = 2**28
# weights of which a product with one row, of their size, stays in a CPU's cache
FEW = 2**21


def rms_norm(x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in fp32 or better, in the type of x (arXiv 1910.07467)."""
    if x.is_cpu and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return RMSNorm.apply(x, weight_d, eps)
    return F.rms_norm(x, weight_d.shape, weight_d.to(x.dtype), eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. A single row on a CPU, as in decoding, waits for memory alone, which BLAS reads at half its speed."""
    if (
        x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.numel() == x.shape[-1]
        and weight.numel() <= FEW
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    ):
        y = torch.linalg.vecdot(weight, x.view(-1))
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def cross_entropy(logits_rv: Tensor, targets_r: Tensor) -> tuple[Tensor, Tensor]:
    """nll_r and logsumexp_r in fp32. The nll of a target of -100 means nothing, and must get no gradient."""
    if not torch.compiler.is_compiling():
        return call(CrossEntropy, logits_rv, targets_r)
    logits_rv = upcast(logits_rv)
    logsumexp_r = logits_rv.logsumexp(1)
    return logsumexp_r - logits_rv.gather(1, targets_r.clamp(min=0)[:, None])[:, 0], logsumexp_r


def chunk_rows(logits_rv: Tensor) -> int:
    """Rows of logits that are in fp32 at a time."""
    return max(1, (CHUNK if logits_rv.is_cpu else GPU_CHUNK) // logits_rv.shape[1])


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
        x32 = upcast(x)
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_d, scale)
        return (x32 * scale).mul_(weight_d).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_d, scale = ctx.saved_tensors
        y = upcast(x) * scale
        grad_weight = (grad * y).flatten(0, -2).sum(0).to(weight_d.dtype)
        grad_y = grad * upcast(weight_d)
        # autocast would round this product, where a backward pass runs inside it
        with torch.autocast(x.device.type, enabled=False):
            mean = torch.linalg.vecdot(grad_y, y).div_(-x.shape[-1])[..., None]
        grad_x = grad_y.addcmul_(y, mean).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class CrossEntropy(torch.autograd.Function):
    """Keeps the logits and one number per row; a row's softmax exists for a chunk of rows at a time only."""

    @staticmethod
    def forward(ctx: Any, logits_rv: Tensor, targets_r: Tensor) -> tuple[Tensor, Tensor]:
        rows = chunk_rows(logits_rv)
        logsumexp_r = torch.cat([upcast(chunk).logsumexp(1) for chunk in logits_rv.split(rows)])
        index_r1 = targets_r.clamp(min=0)[:, None]
        ctx.save_for_backward(logits_rv, index_r1, logsumexp_r)
        return logsumexp_r - logits_rv.gather(1, index_r1)[:, 0], logsumexp_r

    @staticmethod
    def backward(ctx: Any, grad_nll_r: Tensor, grad_logsumexp_r: Tensor) -> tuple[Tensor, None]:
        logits_rv, index_r1, logsumexp_r = ctx.saved_tensors
        rows = chunk_rows(logits_rv)
        grad_rv = torch.empty_like(logits_rv)
        scale_r = grad_nll_r + grad_logsumexp_r
        for i in range(0, len(logits_rv), rows):
            part = slice(i, i + rows)
            softmax = (logits_rv[part] - logsumexp_r[part, None]).exp_()
            grad = softmax.mul_(scale_r[part, None]).scatter_add_(1, index_r1[part], -grad_nll_r[part, None])
            grad_rv[part] = grad
        return grad_rv, None
