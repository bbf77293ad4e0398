"""The write of one mHC sublayer and the read of the next (arXiv 2512.24880), in one operator.

A separate write would store n streams that the next read loads again at once. So a write only passes on its arguments,
and the next read performs both.

Shapes: b batch, t tokens, n streams, i new stream, j old stream, d hidden size, w = n d, m = n (n + 2) width of the
projection: n columns of H_pre, n of H_post, n^2 of H_res.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.ops.backend import expect, fused
from depthlm.ops.mhc.streams import mix_streams, normed_projection, read_streams, sinkhorn


class Pending(NamedTuple):
    """The arguments of a deferred write: the output of the sublayer, and two maps of its read."""

    output_btd: Tensor
    post_btn: Tensor
    res_btij: Tensor


# the maximum number of streams in the registers of a Triton program
MOST_STREAMS = 8


def mhc_post_pre(
    x_btnd: Tensor,
    pending: Pending | None,
    phi_mw: Tensor,
    alpha: Tensor,
    bias_m: Tensor,
    eps: float,
    iterations: int,
    rebuild: bool = False,
    norm_w: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Perform the pending write and the next read; return input_btd, X'_btnd, post_btn and res_btij.

    X' = H_res X + H_post^T y of the pending write, or X without one. H_pre, H_post, H_res = `mhc_maps` of X', and
    input = H_pre X'. The input and X' have the dtype of X. The maps are in fp32 or better.

    phi_mw: the projection. norm_w: the weight of the norm before it; None: phi_mw is multiplied by it already.
    alpha: [3], for pre, post and res.
    rebuild: whether X' may be computed again for the backward pass instead of kept (`depthlm.ops.mhc.rebuilding`).
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    n = x_btnd.shape[2]
    unsupported = None if n <= MOST_STREAMS else f"num_streams={n} is above {MOST_STREAMS}"
    if fused("mhc", (x_btnd, phi_mw, alpha, bias_m, *(pending or ())), unsupported):
        from depthlm.ops.mhc.triton import mhc_post_pre as in_triton

        _check(x_btnd, pending, phi_mw, norm_w, alpha, bias_m)
        return in_triton(x_btnd, pending, phi_mw, norm_w, alpha, bias_m, eps, iterations, rebuild)
    if norm_w is not None:
        phi_mw = norm_w * phi_mw
    if pending is not None:
        x_btnd = write_streams(x_btnd, pending, rebuild)
    pre_btn, post_btn, res_btij = mhc_maps(x_btnd, phi_mw, alpha, bias_m, eps, iterations)
    return read_streams(pre_btn, x_btnd), x_btnd, post_btn, res_btij


def write_streams(x_btnd: Tensor, pending: Pending, rebuild: bool = False) -> Tensor:
    """Return X'_btnd = H_res X + H_post^T y. rebuild: as in `mhc_post_pre`."""
    output_btd, post_btn, res_btij = pending
    return mix_streams(res_btij, x_btnd, post_btn, output_btd, rebuild)


def mhc_maps(
    x_btnd: Tensor, phi_mw: Tensor, alpha: Tensor, bias_m: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre_btn, post_btn and res_btij of the streams (arXiv 2512.24880).

    m = alpha * (phi vec X / rms(vec X)) + bias; H_pre = sigmoid(m_pre), H_post = 2 sigmoid(m_post) and
    H_res = Sinkhorn-Knopp(exp(m_res)).
    """
    n = x_btnd.shape[2]
    projected_btm = normed_projection(x_btnd.flatten(2), phi_mw, eps)
    widths = (n, n, n * n)
    alpha_m = torch.cat([a.expand(width) for a, width in zip(alpha, widths, strict=True)])
    pre, post, res = (alpha_m * projected_btm + bias_m).split(widths, dim=-1)
    return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn(res.unflatten(-1, (n, n)), iterations)


def _check(
    x_btnd: Tensor, pending: Pending | None, phi_mw: Tensor, norm_w: Tensor | None, alpha: Tensor, bias_m: Tensor
) -> None:
    b, t, n, d = x_btnd.shape
    m = n * (n + 2)
    expect("mhc", x_btnd, x=(x_btnd, (b, t, n, d)), phi=(phi_mw, (m, n * d)), alpha=(alpha, (3,)))
    expect("mhc", x_btnd, bias=(bias_m, (m,)))
    if norm_w is not None:
        expect("mhc", x_btnd, norm=(norm_w, (n * d,)))
    if pending is not None:
        output_btd, post_btn, res_btij = pending
        expect("mhc", x_btnd, output=(output_btd, (b, t, d)), post=(post_btn, (b, t, n)))
        expect("mhc", x_btnd, res=(res_btij, (b, t, n, n)))
