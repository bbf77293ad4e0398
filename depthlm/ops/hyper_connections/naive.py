"""The write of one sublayer of hyper-connections and the read of the next (arXiv 2409.19606), in one operator.

As in `depthlm.ops.mhc`, a write only passes on its arguments, and the next read performs both.

This is the definition. Training runs cpu.py or triton.py beside it, and this code only with kernels=naive.

Shapes: b batch, t tokens, n streams, i new stream, j old stream, d hidden size, m = n + 2 width of the projection of a
stream: its parts of H_pre and H_post, and its column of H_res.
"""

from collections.abc import Callable

from torch import Tensor

from depthlm.ops.backend import operator
from depthlm.ops.dtypes import upcast
from depthlm.ops.hyper_connections.cpu import Dynamic, Static
from depthlm.ops.hyper_connections.cpu import hyper_post_pre as cpu
from depthlm.ops.mhc.cpu import Maps, Pending, Result
from depthlm.ops.mhc.naive import read_streams, unsupported, write_streams


def _triton() -> Callable[..., Result]:
    from depthlm.ops.hyper_connections.triton import hyper_post_pre

    return hyper_post_pre


@operator("hyper_connections", triton=_triton, cpu=cpu, unsupported=unsupported)
def hyper_post_pre(
    x_btnd: Tensor, pending: Pending | None, static: Static, dynamic: Dynamic | None, eps: float, rebuild: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Perform the pending write and the next read; return input_btd, X'_btnd, post_btn and res_btij.

    X' = H_res X + H_post^T y of the pending write, or X without one. H_pre, H_post, H_res = `hyper_maps` of X', and
    input = H_pre X'. The input and X' have the dtype of X, and dynamic maps are in fp32 or better; this definition is
    for fp32 and fp64 without autocast.

    Static maps have no Triton kernel: without a dynamic part, PyTorch runs for any choice of kernels.

    rebuild: whether X' may be computed again for the backward pass instead of kept (`depthlm.ops.mhc.rebuilding`).
    Raises, if Triton kernels run: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    if pending is not None:
        x_btnd = write_streams(x_btnd, pending)
    pre_btn, post_btn, res_btij = hyper_maps(x_btnd, static, dynamic, eps)
    return read_streams(pre_btn, x_btnd), x_btnd, post_btn, res_btij


def hyper_maps(x_btnd: Tensor, static: Static, dynamic: Dynamic | None, eps: float) -> Maps:
    """Return pre_btn, post_btn and res_btij of the streams.

    m_j = tanh(W x_j / rms(x_j)) of each stream j;  pre[j] = static_pre[j] + s_0 m_j[0],
    post[j] = static_post[j] + s_1 m_j[1] and res[i, j] = static_res[i, j] + s_0 m_j[2 + i].
    Without a dynamic part, the maps are the static ones.
    """
    b, t, n, _ = x_btnd.shape
    pre_n, post_n, res_ij = static
    if dynamic is None:
        return Maps(pre_n.expand(b, t, n), post_n.expand(b, t, n), res_ij.expand(b, t, n, n))
    w_md, (s_0, s_1) = dynamic
    x_btnd = upcast(x_btnd)
    rms_btn1 = (x_btnd.square().mean(-1, keepdim=True) + eps).sqrt()
    m_btjm = ((x_btnd / rms_btn1) @ upcast(w_md).mT).tanh()
    return Maps(pre_n + s_0 * m_btjm[..., 0], post_n + s_1 * m_btjm[..., 1], res_ij + s_0 * m_btjm[..., 2:].mT)
