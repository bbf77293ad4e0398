"""Kimi Delta Attention: the recurrence for one token, and chunks for more, in PyTorch or by fla-core on a GPU.

Shapes: b batch, t tokens, h heads, d channels of a query and a key, e channels of a value, s documents of all
sequences.
"""

import importlib
import importlib.util
from functools import cache

import torch
from torch import Tensor

from depthlm.locations import install_command
from depthlm.ops.backend import fused
from depthlm.ops.dtypes import exact_dtype, no_autocast, upcast
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
        return _fla(*inputs, state_bhde, starts_bt)
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


def _fla(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    g_bthd: Tensor,
    beta_bth: Tensor,
    state_bhde: Tensor | None,
    starts_bt: Tensor | None,
) -> tuple[Tensor, Tensor]:
    # not a statement, since an export must not require the package
    kda, (b, t) = importlib.import_module("fla.ops.kda"), q_bthd.shape[:2]
    # its recurrence has no backward pass
    function = kda.fused_recurrent_kda if t == 1 and not torch.is_grad_enabled() else kda.chunk_kda
    # its kernels multiply tiles of q, k and v, which must have one dtype
    inputs = [x.to(v_bthe.dtype) for x in (q_bthd, k_bthd)] + [v_bthe, upcast(g_bthd), beta_bth]
    state = None if state_bhde is None else state_bhde.float()
    if starts_bt is None:
        out_bthe, last_bhde = function(*inputs, initial_state=state, output_final_state=True)
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
        *(x.flatten(0, 1)[None] for x in inputs),
        initial_state=state_shde,
        output_final_state=True,
        cu_seqlens=torch.cat((offsets, offsets.new_full((1,), b * t))),
    )
    return out[0].unflatten(0, (b, t)), last_shde[last_b]
