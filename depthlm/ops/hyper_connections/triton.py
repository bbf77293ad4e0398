# mypy: allow-untyped-defs
"""`hyper_post_pre` in Triton. The first pass writes and projects the new streams, the second one reads them.

Shapes: b batch, t tokens, n streams, d hidden size.
"""

import torch
from torch import Tensor

from depthlm.ops.backend import expect
from depthlm.ops.call import call, operator_name
from depthlm.ops.dtypes import common_dtype, compute_dtype
from depthlm.ops.hyper_connections.cpu import hyper_post_pre as static_post_pre
from depthlm.ops.hyper_connections.triton_kernels import backward_kernel, forward_kernel
from depthlm.ops.mhc.cpu import Pending
from depthlm.ops.mhc.rebuilding import save_streams, saved_streams, start_write, written
from depthlm.ops.mhc.triton_write import check_streams, write_again
from depthlm.ops.triton_common import tl, triton

# positions per program, which are the rows of its matrix products: tl.dot requires 16
POSITIONS = 16


def hyper_post_pre(
    x_btnd: Tensor,
    pending: Pending | None,
    static: tuple[Tensor, Tensor, Tensor],
    dynamic: tuple[Tensor, Tensor] | None,
    eps: float,
    rebuild: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `depthlm.ops.hyper_connections.naive.hyper_post_pre` in Triton."""
    if dynamic is None:
        return static_post_pre(x_btnd, pending, static, None, eps, rebuild)
    (n, d), (pre_n, post_n, res_ij), (w_md, scale) = x_btnd.shape[2:], static, dynamic
    check_streams("hyper_connections", x_btnd, pending)
    shapes = {"static_pre": (pre_n, (n,)), "static_post": (post_n, (n,)), "static_res": (res_ij, (n, n))}
    expect("hyper_connections", x_btnd, w=(w_md, (n + 2, d)), scale=(scale, (2,)), **shapes)
    settings = eps, compute_dtype(x_btnd)
    output, post, res = pending or (None, None, None)
    rebuild = rebuild and pending is not None
    read, new, new_post, new_res = call(PostPre, x_btnd, output, post, res, *dynamic, *static, settings, rebuild)
    return read, x_btnd if pending is None else new, new_post, new_res


class PostPre(torch.autograd.Function):
    """Returns input_btd, X'_btnd (empty without a pending write), post_btn and res_btij."""

    @staticmethod
    def forward(ctx, x, output, post, res, w, scale, static_pre, static_post, static_res, settings, rebuild):
        parameters = w, scale, static_pre, static_post, static_res
        read, new, new_post, new_res, *kept = forward(x, output, post, res, *parameters, *settings)
        start_write(ctx, x, rebuild, write_again)
        save_streams(ctx, x, output, post, res, *parameters, *kept, None if ctx.rebuilds or output is None else new)
        ctx.dtype, ctx.shapes = settings[1], (read.shape, new.shape, new_post.shape, new_res.shape)
        ctx.set_materialize_grads(False)
        return read, new, new_post, new_res

    @staticmethod
    def backward(ctx, *grads):
        x, output, post, res, *parameters, pre, projected, rms, new = saved_streams(ctx)
        if output is None:
            new = x
        elif ctx.rebuilds:
            new, ctx.streams = written(ctx), None
        grad_read, grad_new, grad_post, grad_res = (
            rms.new_zeros(shape, dtype=x.dtype if i < 2 else None) if grad is None else grad
            for i, (grad, shape) in enumerate(zip(grads, ctx.shapes, strict=True))
        )
        grad_x, *grad_pending, sums = backward(
            grad_read, None if output is None else grad_new, grad_post, grad_res,
            x, output, post, res, new, *parameters, pre, projected, rms, ctx.dtype,
        )  # fmt: skip
        if output is None:
            grad_pending = [None] * 3
        w, scale, *static = parameters
        packed = w, *static, scale
        # one conversion instead of one per parameter
        parts = sums.to(common_dtype(packed)).split([part.numel() for part in packed])
        grad_w, *grad_static, grad_scale = (
            grad.view(part.shape).to(part.dtype) for grad, part in zip(parts, packed, strict=True)
        )
        return grad_x, *grad_pending, grad_w, grad_scale, *grad_static, None, None


@torch.library.custom_op(operator_name(__name__, "hyper_post_pre"), mutates_args=())
def forward(
    x: Tensor,
    output: Tensor | None,
    post: Tensor | None,
    res: Tensor | None,
    w: Tensor,
    scale: Tensor,
    static_pre: Tensor,
    static_post: Tensor,
    static_res: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return input_btd, X'_btnd (empty without a pending write), post_btn, res_btij and what the backward pass needs.

    The latter is pre_btn, and W x / rms and 1 / rms of each stream. dtype: of the factors of the products.
    """
    b, t, _, d = x.shape
    outputs = _outputs(x, output)
    x = x.contiguous()
    pending = [x if part is None else part.contiguous() for part in (output, post, res)]
    parameters = [part.contiguous() for part in (w, scale, static_pre, static_post, static_res)]
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(b * t, POSITIONS),)](
            x, *pending, *parameters, *outputs, b * t, d, EPS=eps, **_constants(x, output, dtype), num_warps=4
        )
    return outputs


@torch.library.custom_op(operator_name(__name__, "hyper_post_pre_backward"), mutates_args=())
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
    w: Tensor,
    scale: Tensor,
    static_pre: Tensor,
    static_post: Tensor,
    static_res: Tensor,
    pre: Tensor,
    projected: Tensor,
    rms: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, and of output, post and res (these three empty without a pending write).

    The last tensor, in fp32, contains the gradients of w, static_pre, static_post, static_res and scale.
    """
    b, t, _, d = x.shape
    x, programs = x.contiguous(), triton.cdiv(b * t, POSITIONS)
    new = x if output is None else new
    pending = [x if part is None else part.contiguous() for part in (output, post, res)]
    grads = [new if grad is None else grad.contiguous() for grad in (grad_read, grad_new, grad_post, grad_res)]
    out = [x.new_empty(0) if output is None else torch.empty_like(part) for part in pending]
    grad_x, count = torch.empty_like(x), _numbers(w, scale, static_pre, static_post, static_res)
    # aligned rows, so that they are written in pieces of 128 bits
    partial = rms.new_empty(programs, triton.cdiv(count, 32) * 32)
    with torch.cuda.device_of(x):
        backward_kernel[(programs,)](
            *grads, x, *pending, new, w.contiguous(), scale, pre, projected, rms,
            grad_x, *out, torch.empty_like(projected), partial, b * t, d, partial.shape[1],
            **_constants(x, output, dtype), num_warps=4,
        )  # fmt: skip
    return grad_x, out[0], out[1], out[2], partial[:, :count].sum(0)


@forward.register_fake
def _(x, output, post, res, w, scale, static_pre, static_post, static_res, eps, dtype):
    return _outputs(x, output)


@backward.register_fake
def _(
    grad_read, grad_new, grad_post, grad_res, x, output, post, res, new,
    w, scale, static_pre, static_post, static_res, pre, projected, rms, dtype,
):  # fmt: skip
    pending = [x.new_empty(0) if part is None else part.new_empty(part.shape) for part in (output, post, res)]
    return x.new_empty(x.shape), *pending, rms.new_empty(_numbers(w, scale, static_pre, static_post, static_res))


def _outputs(x, output):
    b, t, n, d = x.shape
    exact = {"dtype": torch.float32}
    return (
        x.new_empty(b, t, d),
        x.new_empty(0) if output is None else x.new_empty(b, t, n, d),
        x.new_empty(b, t, n, **exact),
        x.new_empty(b, t, n, n, **exact),
        x.new_empty(b, t, n, **exact),
        x.new_empty(b, t, n, n + 2, **exact),
        x.new_empty(b, t, n, **exact),
    )


def _numbers(*parameters):
    return sum(part.numel() for part in parameters)


def _constants(x, output, dtype):
    n, d = x.shape[2:]
    narrow = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    return {"N": n, "PENDING": output is not None, "NARROW": narrow, "BP": POSITIONS, "BD": _chunk(n, d, x.itemsize)}


def _chunk(n: int, d: int, bytes_per_value: int) -> int:
    """Return the number of columns per chunk, limited by registers. Up to n = 4 no register is spilled."""
    most = 64 if n <= 2 else 128 // bytes_per_value if n <= 4 else 16
    return min(most, max(16, triton.next_power_of_2(d)))
