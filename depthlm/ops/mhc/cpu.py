"""The write of one mHC sublayer and the read of the next in PyTorch, from operators on n parallel residual streams.

On a CPU it is 1.6 to 2.1 times as fast as the definition (benchmarks/kernels.py, fp32, forward and backward).

Shapes: b batch, t tokens, n streams, i new stream, j old stream, d hidden size, w any width, m width of a projection.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlm.ops.autograd import call
from depthlm.ops.dtypes import compute_dtype, no_autocast, upcast
from depthlm.ops.mhc.rebuilding import mark_write, save_streams, saved_streams


class Maps(NamedTuple):
    """H_pre, H_post and H_res of every token. res_btij: None if H_res is the identity."""

    pre_btn: Tensor
    post_btn: Tensor
    res_btij: Tensor | None


class Pending(NamedTuple):
    """The arguments of a deferred write: the output of the sublayer, and two maps of its read."""

    output_btd: Tensor
    post_btn: Tensor
    res_btij: Tensor | None


class Parameters(NamedTuple):
    """The projection, the weight of the norm before it, and the factors and the bias of pre, post and res.

    norm_w: None if the norm has no weight. With m = 2 n rows instead of n (n + 2), and two factors, H_res is the
    identity.
    """

    phi_mw: Tensor
    norm_w: Tensor | None
    alpha: Tensor
    bias_m: Tensor


class Form(NamedTuple):
    """The constants of the maps, by default those of the paper.

    post_scale: the factor of the sigmoid of H_post. pre_eps, post_eps: added to H_pre and H_post. res_eps: added to the
    entries of H_res after its first normalization, and to all later sums.
    """

    post_scale: float = 2.0
    pre_eps: float = 0.0
    post_eps: float = 0.0
    res_eps: float = 0.0


PAPER = Form()
# with a given H_pre of the read, the fifth one is that of the streams
Result = tuple[Tensor, Tensor, Tensor, Tensor | None, *tuple[Tensor, ...]]


def mhc_post_pre(
    x_btnd: Tensor,
    pending: Pending | None,
    parameters: Parameters,
    eps: float,
    iterations: int,
    rebuild: bool = False,
    form: Form = PAPER,
    pre_btn: Tensor | None = None,
) -> Result:
    return write_and_read(x_btnd, pending, rebuild, lambda x: mhc_maps(x, parameters, eps, iterations, form), pre_btn)


def write_and_read(
    x_btnd: Tensor,
    pending: Pending | None,
    rebuild: bool,
    maps_of: Callable[[Tensor], Maps],
    given_btn: Tensor | None = None,
) -> Result:
    """Perform the pending write, if any, and the next read; return input_btd, X'_btnd, post_btn and res_btij.

    given_btn: the H_pre of the read. With it, that of the maps is returned, too.
    """
    if pending is not None:
        x_btnd = write_streams(x_btnd, pending, rebuild)
    pre_btn, post_btn, res_btij = maps_of(x_btnd)
    if given_btn is not None:
        return read_streams(given_btn, x_btnd), x_btnd, post_btn, res_btij, pre_btn
    return read_streams(pre_btn, x_btnd), x_btnd, post_btn, res_btij


def mhc_maps(
    x_btnd: Tensor,
    parameters: Parameters,
    eps: float,
    iterations: int,
    form: Form = PAPER,
    exact_map: Callable[[Tensor, int], Tensor] | None = None,
) -> Maps:
    """Return the maps of the streams (`depthlm.ops.mhc.naive.mhc_maps`).

    exact_map: returns H_res of its columns of m and of n, without iterations; None: the one of Sinkhorn and Knopp.
    """
    n = x_btnd.shape[2]
    phi_mw, norm_w, alpha, bias_m = parameters
    widths = (n, n, len(bias_m) - 2 * n)[: len(alpha)]
    alpha_m = torch.cat([a.expand(width) for a, width in zip(alpha, widths, strict=True)])
    weight_mw = phi_mw if norm_w is None else norm_w * phi_mw
    m_btm = alpha_m * normed_projection(x_btnd.flatten(2), weight_mw, eps) + bias_m
    pre, post, *res = m_btm.split(widths, dim=-1)
    pre, post = pre.sigmoid(), form.post_scale * post.sigmoid()
    # no addition if it is zero: each takes a pass over the maps
    pre, post = pre + form.pre_eps if form.pre_eps else pre, post + form.post_eps if form.post_eps else post
    if exact_map is not None:
        return Maps(pre, post, exact_map(res[0], n))
    return Maps(pre, post, sinkhorn(res[0].unflatten(-1, (n, n)), iterations, form.res_eps) if res else None)


def write_streams(x_btnd: Tensor, pending: Pending, rebuild: bool = False) -> Tensor:
    """Return X'_btnd = H_res X + H_post^T y: sum_j res[i, j] * X_j + post[i] * y for each new stream i.

    Without res, H_res is the identity.

    rebuild: whether the functions of this module may compute the result again instead of saving it.
    """
    output_btd, post_btn, res_btij = pending
    return call(WriteStreams, res_btij, x_btnd, post_btn, output_btd, rebuild)


def read_streams(pre_btn: Tensor, streams_btnd: Tensor) -> Tensor:
    """Return H_pre X = sum_j pre[j] * X_j as x_btd, in the dtype of X."""
    return call(ReadStreams, pre_btn, streams_btnd)


def normed_projection(x: Tensor, weight_mw: Tensor, eps: float) -> Tensor:
    """Return W x / rms(x) over the last dimension, in fp32 or better, without materializing x / rms(x).

    Under autocast the product runs in the autocast dtype, like that of any linear layer.
    """
    return call(NormedProjection, x, weight_mw, eps)


def sinkhorn(logits_btij: Tensor, iterations: int, eps: float = 0.0) -> Tensor:
    """Scale exp(logits) so that rows and columns sum to 1 (`depthlm.ops.mhc.naive.sinkhorn`), in fp32 or better."""
    return call(Sinkhorn, upcast(logits_btij), iterations, eps)


class NormedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_mw: Tensor, eps: float) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        # on a GPU, a copy of x in 16 bits would move more bytes than the product
        dtype = compute_dtype(x) if x.is_cpu else x.dtype
        with no_autocast(x):
            projected = upcast(_project(x.to(dtype), weight_mw.to(dtype))) * scale
        save_streams(ctx, x, weight_mw, scale, projected)
        ctx.dtype = dtype
        return projected

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_mw, scale, projected = saved_streams(ctx)
        grad_low = (grad * scale).to(ctx.dtype)
        with no_autocast(x):
            grad_weight = grad_low.flatten(0, -2).mT @ x.flatten(0, -2).to(ctx.dtype)
            grad_projected = upcast(grad_low @ weight_mw.to(ctx.dtype))
        # the gradient of rms(x) is parallel to x
        along = (grad * projected).sum(-1, keepdim=True).mul_(scale.square()).div_(-x.shape[-1])
        grad_x = grad_projected.addcmul_(x, along)
        return grad_x, grad_weight, None


class ReadStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre_btn: Tensor, streams_btnd: Tensor) -> Tensor:
        save_streams(ctx, streams_btnd, pre_btn)
        return _matmul(pre_btn[..., None, :], streams_btnd)[..., 0, :].to(streams_btnd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_btd: Tensor) -> tuple[Tensor, Tensor]:
        streams_btnd, pre_btn = saved_streams(ctx)
        # a product with one row is faster on a CPU than one with one column
        grad_pre = _matmul(grad_btd[..., None, :], streams_btnd.mT)[..., 0, :]
        grad_streams = pre_btn[..., None].to(grad_btd.dtype) * grad_btd[..., None, :]
        return grad_pre, grad_streams


class WriteStreams(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, res_btij: Tensor | None, streams_btnd: Tensor, post_btn: Tensor, output_btd: Tensor, rebuild: bool
    ) -> Tensor:
        mark_write(ctx, streams_btnd, rebuild, lambda node: _mix(*saved_streams(node)))
        save_streams(ctx, streams_btnd, post_btn, output_btd, *([] if res_btij is None else [res_btij]))
        return _mix(streams_btnd, post_btn, output_btd, res_btij)

    @staticmethod
    def backward(ctx: Any, grad_btnd: Tensor) -> tuple[Tensor | None, ...]:
        streams_btnd, post_btn, output_btd, *res_btij = saved_streams(ctx)
        ctx.streams = None
        grad_res = _matmul(grad_btnd, streams_btnd.mT) if res_btij else None
        grad_streams = _matmul(res_btij[0].mT, grad_btnd) if res_btij else grad_btnd
        grad_post = _matmul(output_btd[..., None, :], grad_btnd.mT)[..., 0, :]
        grad_output = _matmul(post_btn[..., None, :], grad_btnd)[..., 0, :]
        return grad_res, grad_streams, grad_post, grad_output, None


def _mix(streams_btnd: Tensor, post_btn: Tensor, output_btd: Tensor, res_btij: Tensor | None = None) -> Tensor:
    addend = post_btn[..., None], output_btd[..., None, :]
    if res_btij is None:
        return torch.addcmul(upcast(streams_btnd), *addend).to(streams_btnd.dtype)
    return _matmul(res_btij, streams_btnd).addcmul_(*addend).to(streams_btnd.dtype)


class Sinkhorn(torch.autograd.Function):
    """Saves the result and all sums, from which the backward pass recovers every iteration."""

    @staticmethod
    def forward(ctx: Any, logits_btij: Tensor, iterations: int, eps: float) -> Tensor:
        m_ijbt = _tokens_last(logits_btij)
        # scaling a column does not change the result; the floor avoids 0 / 0 in a row that underflows
        m_ijbt.sub_(m_ijbt.amax(0, keepdim=True)).exp_().clamp_min_(1e-30)
        sums = []
        for _ in range(iterations):
            for dim in (0, 1):
                sums.append(m_ijbt.sum(dim, keepdim=True))
                if eps and len(sums) > 1:
                    sums[-1].add_(eps)
                m_ijbt.div_(sums[-1])
                if eps and len(sums) == 1:
                    m_ijbt.add_(eps)
        ctx.save_for_backward(m_ijbt, *sums)
        ctx.eps = eps
        return _tokens_last(m_ijbt)

    @staticmethod
    def backward(ctx: Any, grad_btij: Tensor) -> tuple[Tensor, None, None]:
        result_ijbt, *sums = ctx.saved_tensors
        m, grad = result_ijbt.clone(), _tokens_last(grad_btij)
        for k in reversed(range(len(sums))):
            if ctx.eps and k == 0:
                m.sub_(ctx.eps)
            # m = before / s:  d before = (grad - sum(grad * m)) / s
            grad.sub_((grad * m).sum(k % 2, keepdim=True)).div_(sums[k])
            m.mul_(sums[k])
        return _tokens_last(grad.mul_(m)), None, None


def _tokens_last(m: Tensor) -> Tensor:
    """Copy m_btij to m_ijbt, or back. Sums over i or j are then vectorized over all tokens, although n is small."""
    return m.permute(2, 3, 0, 1).clone(memory_format=torch.contiguous_format)


def _project(x: Tensor, weight_mw: Tensor) -> Tensor:
    """Return W x. A CPU computes W X^T in half the time of X W^T, because m is small."""
    if not x.is_cpu:
        return x @ weight_mw.mT
    return (weight_mw @ x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32 or better, without autocast: a mixing map in 16 bits would scale the streams."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    with no_autocast(a):
        return a.to(dtype) @ b.to(dtype)
