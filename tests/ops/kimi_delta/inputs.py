"""Random inputs of a delta attention, and its results."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import normal

NAMES = ("o", "state", "q", "k", "v", "g", "beta", "initial state")


def inputs(b: int, t: int, h: int, d: int, e: int, strongest: float = 2.0, seed: int = 0) -> list[Tensor]:
    """Return q, k, v, g, beta and a state. Half of the decays are zero in the logarithm."""
    q, k, v, state = (
        normal(b, *shape, seed=seed + i) for i, shape in enumerate([(t, h, d)] * 2 + [(t, h, e), (h, d, e)])
    )
    uniform = torch.rand(b, t, h, d + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    g, beta = (uniform[..., :d] - 0.5).clamp(min=0) * -2 * strongest, uniform[..., d]
    return [x.detach().requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta, state)]


def starts(b: int, t: int, share: float, seed: int = 0) -> Tensor:
    return torch.rand(b, t, generator=torch.Generator().manual_seed(seed)) < share


def results(
    function: Callable[..., tuple[Tensor, Tensor]], arguments: list[Tensor], starts_bt: Tensor | None = None
) -> list[Tensor]:
    """Return o, the last state, and the gradients of all arguments."""
    found = function(*arguments, starts_bt=starts_bt)
    # the same numbers in every dtype
    along = [normal(*x.shape, seed=50 + i).bfloat16().to(x) for i, x in enumerate(found)]
    return [*found, *torch.autograd.grad(found, arguments, along)]
