"""The write of one sublayer of hyper-connections and the read of the next (arXiv 2409.19606), in one operator.

As in `depthlm.ops.mhc`, a write only passes on its arguments, and the next read performs both.

Shapes: b batch, t tokens, n streams, i new stream, j old stream, d hidden size, m = n + 2 width of the projection of a
stream: its parts of H_pre and H_post, and its column of H_res.
"""

from torch import Tensor

from depthlm.ops.backend import expect, fused
from depthlm.ops.mhc.reference import MOST_STREAMS, Pending, write_streams
from depthlm.ops.mhc.streams import normed_projection, read_streams

# static_pre_n, static_post_n and static_res_ij
Static = tuple[Tensor, Tensor, Tensor]
# w_md, and scale: [2], the first for pre and res, the second for post
Dynamic = tuple[Tensor, Tensor]


def hyper_post_pre(
    x_btnd: Tensor,
    pending: Pending | None,
    static: Static,
    dynamic: Dynamic | None,
    eps: float,
    rebuild: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Perform the pending write and the next read; return input_btd, X'_btnd, post_btn and res_btij.

    X' = H_res X + H_post^T y of the pending write, or X without one. H_pre, H_post, H_res = `hyper_maps` of X', and
    input = H_pre X'. The input and X' have the dtype of X. Dynamic maps are in fp32 or better.

    Static maps have no Triton kernel: without a dynamic part, PyTorch runs for any choice of kernels.

    rebuild: whether X' may be computed again for the backward pass instead of kept (`depthlm.ops.mhc.rebuilding`).
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    n = x_btnd.shape[2]
    unsupported = None if n <= MOST_STREAMS else f"num_streams={n} is above {MOST_STREAMS}"
    if dynamic is not None and fused("hyper_connections", (x_btnd, *static, *dynamic, *(pending or ())), unsupported):
        from depthlm.ops.hyper_connections.triton import hyper_post_pre as in_triton

        _check(x_btnd, pending, static, dynamic)
        return in_triton(x_btnd, pending, static, dynamic, eps, rebuild)
    if pending is not None:
        x_btnd = write_streams(x_btnd, pending, rebuild)
    pre_btn, post_btn, res_btij = hyper_maps(x_btnd, static, dynamic, eps)
    return read_streams(pre_btn, x_btnd), x_btnd, post_btn, res_btij


def hyper_maps(x_btnd: Tensor, static: Static, dynamic: Dynamic | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre_btn, post_btn and res_btij of the streams (arXiv 2409.19606).

    m_j = tanh(W x_j / rms(x_j)) of each stream j;  pre[j] = static_pre[j] + s_0 m_j[0],
    post[j] = static_post[j] + s_1 m_j[1] and res[i, j] = static_res[i, j] + s_0 m_j[2 + i].
    Without a dynamic part, the maps are the static ones.
    """
    b, t, n, _ = x_btnd.shape
    static_pre_n, static_post_n, res = static
    pre, post = static_pre_n.expand(b, t, n), static_post_n.expand(b, t, n)
    if dynamic is None:
        return pre, post, res.expand(b, t, n, n)
    w_md, scale = dynamic
    m_btnm = normed_projection(x_btnd, w_md, eps).tanh()
    s_pre_res, s_post = scale
    pre_btj, post_btj, res_btji = m_btnm.split((1, 1, n), dim=-1)
    return pre + s_pre_res * pre_btj[..., 0], post + s_post * post_btj[..., 0], res + s_pre_res * res_btji.mT


def _check(x_btnd: Tensor, pending: Pending | None, static: Static, dynamic: Dynamic) -> None:
    b, t, n, d = x_btnd.shape
    (pre_n, post_n, res_ij), (w_md, scale) = static, dynamic
    expect("hyper_connections", x_btnd, x=(x_btnd, (b, t, n, d)), w=(w_md, (n + 2, d)), scale=(scale, (2,)))
    expect(
        "hyper_connections", x_btnd, static_pre=(pre_n, (n,)), static_post=(post_n, (n,)), static_res=(res_ij, (n, n))
    )
    if pending is not None:
        output_btd, post_btn, res_btij = pending
        expect("hyper_connections", x_btnd, output=(output_btd, (b, t, d)), post=(post_btn, (b, t, n)))
        expect("hyper_connections", x_btnd, res=(res_btij, (b, t, n, n)))
