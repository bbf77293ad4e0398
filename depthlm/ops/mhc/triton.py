# mypy: allow-untyped-defs
"""`mhc_post_pre` in Triton. The first pass writes and projects the new streams, the second one reads them.

Shapes: b batch, t tokens, n streams, d hidden size, m = n (n + 2).
"""

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.call import call, operator_name
from depthlm.ops.dtypes import compute_dtype, no_autocast
from depthlm.ops.mhc.rebuilding import save_streams, saved_streams, start_write, written
from depthlm.ops.mhc.triton_kernels import backward_kernel, forward_kernel
from depthlm.ops.mhc.triton_write import check_streams, write_again

try:
    import triton
except ImportError as error:
    raise ImportError("fused kernels need the package triton") from error

# positions per program, which are the rows of its matrix products: tl.dot requires 16
POSITIONS = 16


def mhc_post_pre(
    x_btnd: Tensor,
    pending: tuple[Tensor, Tensor, Tensor] | None,
    phi_mw: Tensor,
    alpha: Tensor,
    bias_m: Tensor,
    eps: float,
    iterations: int,
    rebuild: bool = False,
    norm_w: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `depthlm.ops.mhc.naive.mhc_post_pre` in Triton."""
    n, d = x_btnd.shape[2:]
    m = n * (n + 2)
    check_streams("mhc", x_btnd, pending)
    expect("mhc", x_btnd, phi=(phi_mw, (m, n * d)), alpha=(alpha, (3,)), bias=(bias_m, (m,)))
    if norm_w is not None:
        expect("mhc", x_btnd, norm=(norm_w, (n * d,)))
    settings = eps, iterations
    output, post, res = pending or (None, None, None)
    rebuild = rebuild and pending is not None
    arguments = x_btnd, output, post, res, phi_mw, norm_w, alpha, bias_m, compute_dtype(x_btnd), settings, rebuild
    read, new, new_post, new_res = call(PostPre, *arguments)
    return read, x_btnd if pending is None else new, new_post, new_res


class PostPre(torch.autograd.Function):
    """Returns input_btd, X'_btnd (empty without a pending write), post_btn and res_btij."""

    @staticmethod
    def forward(ctx, x, output, post, res, phi, norm, alpha, bias, dtype, settings, rebuild):
        # in the dtype of the products, as the backward pass needs it too
        low = phi.to(dtype) if norm is None else torch.mul(norm, phi, out=phi.new_empty(phi.shape, dtype=dtype))
        read, new, new_post, new_res, projected, scale = forward(x, output, post, res, low, alpha, bias, *settings)
        start_write(ctx, x, rebuild, write_again)
        kept = None if ctx.rebuilds or output is None else new
        save_streams(ctx, x, output, post, res, low, alpha, bias, projected, scale, phi, norm, kept)
        ctx.iterations, ctx.shapes = settings[1], (read.shape, new.shape, new_post.shape, new_res.shape)
        ctx.set_materialize_grads(False)
        return read, new, new_post, new_res

    @staticmethod
    def backward(ctx, *grads):
        x, output, post, res, low, alpha, bias, projected, scale, phi, norm, new = saved_streams(ctx)
        if output is None:
            new = x
        elif ctx.rebuilds:
            new, ctx.streams = written(ctx), None
        grad_read, grad_new, grad_post, grad_res = (
            scale.new_zeros(shape, dtype=x.dtype if i < 2 else None) if grad is None else grad
            for i, (grad, shape) in enumerate(zip(grads, ctx.shapes, strict=True))
        )
        grad_x, *grad_pending, grad_phi, sums = backward(
            grad_read, None if output is None else grad_new, grad_post, grad_res,
            x, output, post, res, new, low, alpha, bias, projected, scale, ctx.iterations,
        )  # fmt: skip
        if output is None:
            grad_pending = [None] * 3
        grad_bias, grad_alpha = sums.split((len(bias), len(alpha)))
        grad_norm, grad_phi = None, grad_phi.to(phi.dtype)
        if norm is not None:
            grad_norm, grad_phi = (grad_phi * phi).sum(0), grad_phi * norm
        weights = grad_phi, grad_norm, grad_alpha.to(alpha.dtype), grad_bias.to(bias.dtype)
        return grad_x, *grad_pending, *weights, None, None, None


@torch.library.custom_op(operator_name(__name__, "mhc_post_pre"), mutates_args=())
def forward(
    x: Tensor,
    output: Tensor | None,
    post: Tensor | None,
    res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return input_btd, X'_btnd (empty without a pending write), post_btn, res_btij, projected_btm and 1 / rms_bt."""
    b, t, n, d = x.shape
    outputs = _outputs(x, output)
    x = x.contiguous()
    pending = [x if part is None else part.contiguous() for part in (output, post, res)]
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(b * t, POSITIONS),)](
            x, *pending, phi.contiguous(), alpha.contiguous(), bias.contiguous(), *outputs, b * t, d, iterations,
            EPS=eps, N=n, NP=_padded(n), PENDING=output is not None, BP=POSITIONS, BD=_chunk(n, d), num_warps=4,
        )  # fmt: skip
    return outputs


@torch.library.custom_op(operator_name(__name__, "mhc_post_pre_backward"), mutates_args=())
def backward(
    grad_read: Tensor,
    grad_new: Tensor | None,
    grad_post: Tensor,
    grad_res: Tensor,
    x: Tensor,
    output: Tensor | None,
    post: Tensor | None,
    res: Tensor | None,
    new: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    projected: Tensor,
    scale: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, output, post, res (these three empty without a pending write) and phi.

    The last tensor, in fp32, contains the gradients of bias and alpha.
    """
    b, t, n, d = x.shape
    pending = output is not None
    x, programs = x.contiguous(), triton.cdiv(b * t, POSITIONS)
    new = new if pending else x
    contiguous_pending = [x if part is None else part.contiguous() for part in (output, post, res)]
    grads = [new if grad is None else grad.contiguous() for grad in (grad_read, grad_new, grad_post, grad_res)]
    out = [
        torch.empty_like(part, memory_format=torch.contiguous_format) if pending else x.new_empty(0)
        for part in contiguous_pending
    ]
    grad_x, grad_projected = torch.empty_like(x), projected.new_empty(projected.shape, dtype=new.dtype)
    partial = scale.new_empty(programs, len(bias) + len(alpha))
    sums = scale.new_empty(b * t, iterations, 2, _padded(n))
    with torch.cuda.device_of(x):
        backward_kernel[(programs,)](
            *grads, x, *contiguous_pending, new, phi.contiguous(), alpha.contiguous(), bias.contiguous(), projected,
            scale, sums, grad_x, *out, grad_projected, partial, b * t, d, iterations,
            N=n, NP=_padded(n), PENDING=pending, BP=POSITIONS, BD=_chunk(n, d), num_warps=4,
        )  # fmt: skip
    with no_autocast(x):
        # in the dtype of the streams: a copy of them in 16 bits would move more bytes than the product
        grad_phi = grad_projected.view(b * t, -1).mT @ new.view(b * t, n * d)
    return grad_x, out[0], out[1], out[2], grad_phi, partial.sum(0)


@forward.register_fake
def _(x, output, post, res, phi, alpha, bias, eps, iterations):
    return _outputs(x, output)


@backward.register_fake
def _(grad_read, grad_new, grad_post, grad_res, x, output, post, res, new, phi, alpha, bias, projected, scale, _):
    pending = [x.new_empty(0) if part is None else part.new_empty(part.shape) for part in (output, post, res)]
    sums = scale.new_empty(len(bias) + len(alpha))
    return x.new_empty(x.shape), *pending, x.new_empty(phi.shape), sums


def _outputs(x, output):
    b, t, n, d = x.shape
    exact = {"dtype": torch.float32}
    return (
        x.new_empty(b, t, d),
        x.new_empty(0) if output is None else x.new_empty(b, t, n, d),
        x.new_empty(b, t, n, **exact),
        x.new_empty(b, t, n, n, **exact),
        x.new_empty(b, t, n * (n + 2), **exact),
        x.new_empty(b, t, **exact),
    )


def _padded(n: int) -> int:
    return max(4, triton.next_power_of_2(n))


def _chunk(n: int, d: int) -> int:
    """Return the number of columns per chunk, limited by registers. Up to n = 4 no register is spilled."""
    most = 64 if n <= 2 else 32 if n <= 4 else 16
    return min(most, max(16, triton.next_power_of_2(d)))
