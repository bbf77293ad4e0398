"""The write of one mHC sublayer and the read of the next (arXiv 2512.24880), in one operator.

After a separate write, the read would load X' twice, for its maps and for H_pre X'. So a write only passes on its
arguments, and the next read performs both: it projects X' for the maps while a part of X' is in registers.

This is the definition. Training runs cpu.py or triton.py beside it, and this code only with kernels=naive.

Shapes: b batch, t tokens, n streams, i new stream, j old stream, d hidden size, w = n d, m = n (n + 2) width of the
projection: n columns of H_pre, n of H_post, n^2 of H_res; m = 2 n if H_res is the identity.
"""

from collections.abc import Callable

from torch import Tensor

from depthlm.ops.backend import operator
from depthlm.ops.dtypes import upcast
from depthlm.ops.mhc.cpu import PAPER, Form, Maps, Parameters, Pending, Result
from depthlm.ops.mhc.cpu import mhc_post_pre as cpu

# the maximum number of streams in the registers of a Triton program
MAX_STREAMS = 8


def _triton() -> Callable[..., Result]:
    from depthlm.ops.mhc.triton import mhc_post_pre

    return mhc_post_pre


def unsupported(x_btnd: Tensor, *_: object, **__: object) -> str | None:
    """Return why Triton kernels do not support these streams, or None."""
    n = x_btnd.shape[2]
    return None if n <= MAX_STREAMS else f"num_streams={n} is above {MAX_STREAMS}"


@operator("mhc", triton=_triton, cpu=cpu, unsupported=unsupported)
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
    """Perform the pending write and the next read; return input_btd, X'_btnd, post_btn and res_btij.

    X' = H_res X + H_post^T y of the pending write, or X without one. H_pre, H_post, H_res = `mhc_maps` of X', and
    input = H_pre X'. res_btij is None if H_res is the identity. The input and X' have the dtype of X, and the maps are
    in fp32 or better; this definition is for fp32 and fp64 without autocast.

    pre_btn: the H_pre of the read, such as that of the sublayer before. The H_pre of X' is then the fifth result.
    rebuild: whether X' may be computed again for the backward pass instead of kept (`depthlm.ops.mhc.rebuilding`).
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    if pending is not None:
        x_btnd = write_streams(x_btnd, pending)
    own_btn, post_btn, res_btij = mhc_maps(x_btnd, parameters, eps, iterations, form)
    if pre_btn is None:
        return read_streams(own_btn, x_btnd), x_btnd, post_btn, res_btij
    return read_streams(pre_btn, x_btnd), x_btnd, post_btn, res_btij, own_btn


def write_streams(x_btnd: Tensor, pending: Pending) -> Tensor:
    """Return X'_btnd = H_res X + H_post^T y. Without res, H_res is the identity."""
    output_btd, post_btn, res_btij = pending
    mixed_btnd = x_btnd if res_btij is None else res_btij @ x_btnd
    return mixed_btnd + post_btn[..., None] * output_btd[..., None, :]


def read_streams(pre_btn: Tensor, x_btnd: Tensor) -> Tensor:
    """Return H_pre X as x_btd."""
    return (pre_btn[..., None] * x_btnd).sum(2)


def mhc_maps(x_btnd: Tensor, parameters: Parameters, eps: float, iterations: int, form: Form = PAPER) -> Maps:
    """Return pre_btn, post_btn and res_btij of the streams.

    m = alpha * (phi RMSNorm(vec X)) + bias; H_pre = sigmoid(m_pre) + pre_eps, H_post = post_scale sigmoid(m_post) +
    post_eps and H_res = Sinkhorn-Knopp(exp(m_res)). alpha has one number for pre, post and res each.
    """
    n, x_btw = x_btnd.shape[2], upcast(x_btnd).flatten(2)
    phi_mw, norm_w, alpha, bias_m = parameters
    rms_bt1 = (x_btw.square().mean(-1, keepdim=True) + eps).sqrt()
    projected_btm = (x_btw / rms_bt1) @ upcast(phi_mw if norm_w is None else norm_w * phi_mw).mT
    widths = (n, n, n * n)[: len(alpha)]
    parts, biases = projected_btm.split(widths, -1), bias_m.split(widths)
    pre, post, *res = (a * part + bias for a, part, bias in zip(alpha, parts, biases, strict=True))
    pre_btn, post_btn = pre.sigmoid() + form.pre_eps, form.post_scale * post.sigmoid() + form.post_eps
    return Maps(pre_btn, post_btn, sinkhorn(res[0].unflatten(-1, (n, n)), iterations, form.res_eps) if res else None)


def sinkhorn(logits_btij: Tensor, iterations: int, eps: float = 0.0) -> Tensor:
    """Scale exp(logits) so that rows and columns sum to 1 (Sinkhorn and Knopp, 1967).

    Each iteration divides the columns by their sums, then the rows. So the sums of rows are exact and those of columns
    are approximate. The first division is a softmax of each column; eps is added to its results, and to all later sums.
    """
    m_btij = logits_btij.softmax(-2) + eps
    m_btij = m_btij / (m_btij.sum(-1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m_btij = m_btij / (m_btij.sum(-2, keepdim=True) + eps)
        m_btij = m_btij / (m_btij.sum(-1, keepdim=True) + eps)
    return m_btij
