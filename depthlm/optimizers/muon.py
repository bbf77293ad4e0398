"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# the kinds of parameters that Muon optimizes, and the constants of torch.optim.Muon
MATRICES = ("matrix", "experts")
COEFFICIENTS, SMALLEST_NORM, DTYPE = (3.4445, -4.7750, 2.0315), 1e-7, torch.bfloat16


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the groups of hidden matrices and of experts, and torch's AdamW for all others, as one optimizer.

    Muon is that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw" (arXiv 2502.16982, section 2.2): Nesterov
    momentum, orthogonalization in bf16, and updates of the RMS of AdamW's, so that both share one learning rate. Each
    matrix of stacked experts is updated as if it were alone.

    Momentum and weight decay are computed element by element, so a parameter may be a flat partition of matrices, as
    in ZeRO. split: what orthogonalizes the matrices of such a partition, of which other ranks may have parts: an
    `Exchange` of depthlm.training.engine.optimizers.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        others = [group for group in groups if group["kind"] not in MATRICES]
        # AdamW refuses an empty list, which some stages of a pipeline have; `step` replaces the groups
        self.adamw = torch.optim.AdamW(others or [{"params": [torch.zeros(0)]}], lr, betas, eps, fused=True)
        for group in groups:
            if group["kind"] in MATRICES:
                group |= {"momentum": momentum, "ns_steps": ns_steps}
        super().__init__(groups, {"lr": lr})
        self.split: Mapping[Tensor, Any] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every group once."""
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if group["kind"] not in MATRICES]
        self.adamw.step()
        for group in self.param_groups:
            if group["kind"] in MATRICES:
                self._update_matrices(group)

    def _update_matrices(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(momentum, group["momentum"]).to(DTYPE)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            if parameter in self.split:
                parts = self.split[parameter].orthogonalize(update, group["ns_steps"])
            else:
                stack = update.view(-1, *update.shape[-2:])
                parts = [Orthogonalized(0, orthogonalize(stack, group["ns_steps"]).view_as(update), update.shape)]
            for part in parts:
                target = parameter.view(-1)[part.offset : part.offset + part.values.numel()].view_as(part.values)
                target.add_(part.values, alpha=-group["lr"] * 0.2 * math.sqrt(max(part.shape[-2:])))


class Orthogonalized(NamedTuple):
    """Orthogonalized elements of matrices of a shape [..., m, n]. offset: of the first in the flattened parameter."""

    offset: int
    values: Tensor
    shape: Sequence[int]


def orthogonalize(stack_emn: Tensor, steps: int) -> Tensor:
    """Return the matrices of a stack [e, m, n] with singular values of about 1.

    Newton-Schulz iterations as in torch.optim.Muon, for all matrices at once.
    """
    a, b, c = COEFFICIENTS
    tall = stack_emn.shape[1] > stack_emn.shape[2]
    # the smaller of the two Gram matrices
    x_ers = stack_emn.mT if tall else stack_emn
    x_ers = x_ers / x_ers.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram_err = x_ers @ x_ers.mT
        x_ers = torch.baddbmm(x_ers, torch.baddbmm(gram_err, gram_err, gram_err, beta=b, alpha=c), x_ers, beta=a)
    return x_ers.mT if tall else x_ers
