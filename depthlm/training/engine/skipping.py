"""Skip an update on all ranks if the reduced gradient is not finite on any of them.

After the reduction a value may become non-finite on one rank alone, as by bad memory. DeepSpeed's optimizers ask all
ranks, except where each of them has the whole gradient: at ZeRO 0, and in bf16 at ZeRO 1.
"""

from typing import Any

import torch
from torch import Tensor, nn

from depthlm.training.engine.spreading import total_norm


def guard_step(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Make `optimizer.step` clip by the global gradient norm, and skip the update if that norm is not finite.

    At ZeRO stage 0 DeepSpeed does not check gradients, but reads `overflow` and `_global_grad_norm` of the optimizer,
    which its own optimizers set at the higher stages. With this guard every stage reports the same.
    """
    update = optimizer.step

    def step(*arguments: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm(parameters)
        optimizer.overflow = invalid_on_any_rank(norm)  # type: ignore[attr-defined]
        optimizer._global_grad_norm = float("inf") if optimizer.overflow else float(norm)  # type: ignore[attr-defined]
        if not optimizer.overflow:  # type: ignore[attr-defined]
            if max_norm > 0:
                nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            update()

    optimizer.step = step  # type: ignore[method-assign, assignment]


def agree_on_bf16_norm(device: torch.device) -> None:
    """Let DeepSpeed's optimizer for bf16 at ZeRO 1 ask all ranks whether the norm of the gradient is finite."""
    from deepspeed.runtime import bf16_optimizer

    # with experts the norm is a number
    bf16_optimizer.is_invalid_grad_norm = lambda norm: invalid_on_any_rank(torch.as_tensor(norm, device=device))


def invalid_on_any_rank(norm: Tensor) -> bool:
    """Return whether the norm of a gradient is not finite on any rank, or is -1, as DeepSpeed marks it; collective."""
    invalid = (~torch.isfinite(norm) | (norm < 0)).int()
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(invalid, op=torch.distributed.ReduceOp.MAX)
    return bool(invalid)
