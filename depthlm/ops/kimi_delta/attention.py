"""Kimi Delta Attention: the recurrence for one token, and chunks for more, in PyTorch or by fla-core on a GPU.

This module also has what surrounds it: a short causal convolution of each channel of its inputs, and its norms.

Shapes: b batch, t tokens, h heads, d channels of a query and a key, e channels of a value, s documents of all
sequences, c channels, 3 earlier tokens, 4 taps of the kernel, of which the last is for the token itself.
"""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from depthlm.locations import install_command
from depthlm.ops.autograd import call
from depthlm.ops.backend import fused
from depthlm.ops.dtypes import exact_dtype, no_autocast, upcast
from depthlm.ops.functions import rms_norm
from depthlm.ops.kimi_delta.chunked import chunked
from depthlm.ops.kimi_delta.naive import recurrence, zero_state

# the most channels of a query that fla-core supports
WIDEST = 256


def delta_attention(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    g_bthd: Tensor,
    beta_bth: Tensor,
    state_bhde: Tensor | None = None,
    starts_bt: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o_bthe in the dtype of v, and the state after the last token in fp32 or better.

    The result is that of `recurrence`, which describes the arguments, in fp32 or better also under autocast. Keys must
    have a norm of at most 1, or the state may grow without bound.
    Raises: ValueError with kernels=triton on a GPU where fla-core cannot run. On other devices, PyTorch runs.
    """
    inputs = q_bthd, k_bthd, v_bthe, g_bthd, beta_bth
    if _by_fla(*inputs):
        return _fla(inputs, state_bhde, starts_bt)
    if q_bthd.shape[1] > 1:
        return chunked(*inputs, state_bhde, starts_bt)
    dtype = exact_dtype(inputs)
    q, k, v, g, beta = (x.to(dtype) for x in inputs)
    state = None if state_bhde is None else state_bhde.to(dtype)
    with no_autocast(q_bthd):
        out_bthe, last_bhde = recurrence(q, k, v, g, beta, state, starts_bt)
    return out_bthe.to(v_bthe.dtype), last_bhde


@cache
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def _by_fla(q_bthd: Tensor, *others: Tensor) -> bool:
    if not q_bthd.is_cuda:
        return False
    unsupported = None
    if not _installed():
        unsupported = f"fla-core is not installed: {install_command('kimi')}"
    elif q_bthd.shape[3] > WIDEST:
        unsupported = f"{q_bthd.shape[3]} channels of a query are more than {WIDEST}"
    return fused("kimi_delta", (q_bthd, *others), unsupported)


def _fla(inputs: tuple[Tensor, ...], state_bhde: Tensor | None, starts_bt: Tensor | None) -> tuple[Tensor, Tensor]:
    q_bthd, k_bthd, v_bthe, g_bthd, beta_bth = inputs
    # not a statement, since an export must not require the package
    kda, (b, t) = importlib.import_module("fla.ops.kda"), q_bthd.shape[:2]
    # its recurrence has no backward pass
    function = kda.fused_recurrent_kda if t == 1 and not torch.is_grad_enabled() else kda.chunk_kda
    # its kernels multiply tiles of q, k and v, which must have one dtype
    arguments = [x.to(v_bthe.dtype) for x in (q_bthd, k_bthd)] + [v_bthe, upcast(g_bthd), beta_bth]
    state = None if state_bhde is None else state_bhde.float()
    if starts_bt is None:
        out_bthe, last_bhde = function(*arguments, initial_state=state, output_final_state=True)
        return out_bthe, last_bhde
    # the documents of all sequences become sequences of different lengths
    begins_bt = starts_bt.clone()
    begins_bt[:, 0] = True
    offsets = begins_bt.flatten().nonzero()[:, 0]
    last_b = begins_bt.sum(1).cumsum(0) - 1
    state_shde = None
    if state is not None:
        first_b = torch.cat((last_b.new_zeros(1), last_b[:-1] + 1))
        state_shde = zero_state(k_bthd[:1], v_bthe).float().repeat(len(offsets), 1, 1, 1)
        state_shde = state_shde.index_copy(0, first_b, state.masked_fill(starts_bt[:, :1, None, None], 0))
    out, last_shde = function(
        *(x.flatten(0, 1)[None] for x in arguments),
        initial_state=state_shde,
        output_final_state=True,
        cu_seqlens=torch.cat((offsets, offsets.new_full((1,), b * t))),
    )
    return out[0].unflatten(0, (b, t)), last_shde[last_b]


def short_convolution(
    x_btc: Tensor, weight_c4: Tensor, cache_b3c: Tensor | None = None, starts_bt: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return silu(sum_i weight_i x_{t-3+i}) in the dtype of x, computed in fp32 or better, and the next cache.

    cache_b3c: the inputs before the first token; None: zero. starts_bt: true where a document begins, whose tokens are
    not added to any other document's; None: nowhere.
    """
    before = x_btc.new_zeros(x_btc.shape[0], 3, x_btc.shape[2]) if cache_b3c is None else cache_b3c
    padded = torch.cat((before, x_btc), dim=1)
    if starts_bt is None:
        return call(_Convolution, padded, weight_c4, None), padded[:, -3:]
    document_bt = F.pad(starts_bt.cumsum(1), (3, 0))
    cache = padded[:, -3:] * (document_bt[:, -3:] == document_bt[:, -1:])[..., None]
    return call(_Convolution, padded, weight_c4, document_bt), cache


class _Convolution(torch.autograd.Function):
    """Four products with shifted inputs, on a CPU 1.2 times as fast as PyTorch's convolution of each channel."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, document: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded, weight, document)
        return F.silu(_sum(padded, weight, document)).to(padded.dtype)

    @staticmethod
    def backward(ctx: Any, grad_btc: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, document = ctx.saved_tensors
        grad = torch.ops.aten.silu_backward(upcast(grad_btc), _sum(padded, weight, document))
        x, w, t = upcast(padded), upcast(weight), grad.shape[1]
        grad_x, grad_w = torch.zeros_like(x), torch.empty_like(w)
        for i in range(4):
            reached = grad if document is None else grad * _reached(document, i)
            grad_x[:, i : i + t].addcmul_(reached, w[:, i])
            grad_w[:, i] = (reached * x[:, i : i + t]).sum((0, 1))
        return grad_x.to(padded.dtype), grad_w.to(weight.dtype), None


def _sum(padded: Tensor, weight: Tensor, document: Tensor | None) -> Tensor:
    x, w, t = upcast(padded), upcast(weight), padded.shape[1] - 3
    total = x[:, 3:] * w[:, 3]
    for i in range(3):
        shifted = x[:, i : i + t]
        total.addcmul_(shifted if document is None else shifted * _reached(document, i), w[:, i])
    return total


def _reached(document: Tensor, i: int) -> Tensor:
    """Return, by token, whether tap i is in its document, as a mask_bt1."""
    return (document[:, 3:] == document[:, i : document.shape[1] - 3 + i])[..., None]


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(|x|^2 + eps) over the last dimension, in the dtype of x."""
    exact = upcast(x)
    return (exact * ((exact * exact).sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * weight * sigmoid(gate) over the last dimension, in the dtype of x."""
    return (rms_norm(upcast(x), weight_d, eps) * upcast(gate).sigmoid()).to(x.dtype)
