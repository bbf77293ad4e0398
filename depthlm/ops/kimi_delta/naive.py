"""The recurrence of Kimi Delta Attention (arXiv 2510.26692).

With the state S of a head, a d x e matrix that is zero before the first token,

    S_t = diag(exp g_t) S_{t-1} + beta_t k_t (v_t - k_t^T diag(exp g_t) S_{t-1})^T;    o_t = S_t^T q_t / sqrt(d).

Shapes: b batch, t tokens, h heads, d channels of a query and a key, e channels of a value.
"""

import torch
from torch import Tensor


def recurrence(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    g_bthd: Tensor,
    beta_bth: Tensor,
    state_bhde: Tensor | None = None,
    starts_bt: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o_bthe and the last state, token by token, in the dtype of the inputs.

    g_bthd: the logarithm of the decay, at most 0. state_bhde: the state before the first token; None: zero.
    starts_bt: true where a document begins, before which the state is zero; None: nowhere.
    """
    scale, decay_bthd = q_bthd.shape[3] ** -0.5, g_bthd.exp()
    state = zero_state(k_bthd, v_bthe) if state_bhde is None else state_bhde
    outputs = []
    for t in range(q_bthd.shape[1]):
        if starts_bt is not None:
            state = state.masked_fill(starts_bt[:, t, None, None, None], 0)
        state = state * decay_bthd[:, t, :, :, None]
        error_bhe = v_bthe[:, t] - torch.einsum("bhd,bhde->bhe", k_bthd[:, t], state)
        written_bhd = k_bthd[:, t] * beta_bth[:, t, :, None]
        state = state + written_bhd[..., None] * error_bhe[..., None, :]
        outputs.append(torch.einsum("bhd,bhde->bhe", q_bthd[:, t] * scale, state))
    return torch.stack(outputs, dim=1), state


def zero_state(k_bthd: Tensor, v_bthe: Tensor) -> Tensor:
    """Return state_bhde before the first token of a sequence."""
    return k_bthd.new_zeros(*k_bthd.shape[::2], k_bthd.shape[3], v_bthe.shape[3])
