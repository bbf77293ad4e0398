"""The norms around a delta attention, in fp32 or better."""

from torch import Tensor

from depthlm.ops.dtypes import upcast
from depthlm.ops.functions import rms_norm


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(|x|^2 + eps) over the last dimension, in the dtype of x."""
    exact = upcast(x)
    return (exact * ((exact * exact).sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * weight * sigmoid(gate) over the last dimension, in the dtype of x."""
    return (rms_norm(upcast(x), weight_d, eps) * upcast(gate).sigmoid()).to(x.dtype)
