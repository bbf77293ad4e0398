"""Optimizers that average the weights, such as schedule-free ones: the averages are evaluated and exported."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def averaged(optimizer: Any, zero: Any | None) -> Iterator[None]:
    """Give the model the averages of an optimizer while the block runs, and then its weights, bit for bit; collective.

    Does nothing for an optimizer without averages. zero: DeepSpeed's optimizer around it at ZeRO 1 to 3.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    with all_parameters(zero):
        flats: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # `train` computes the weights from the averages, with other rounding
        weights = [flat.detach().clone() for flat in flats]
        optimizer.eval()
    show(zero)
    try:
        yield
    finally:
        with all_parameters(zero), torch.no_grad():
            optimizer.train()
            for flat, saved in zip(flats, weights, strict=True):
                flat.copy_(saved)
        show(zero)


@contextmanager
def all_parameters(zero: Any | None) -> Iterator[None]:
    """Give the groups of an optimizer their parameters, which DeepSpeed's ZeRO 3 removes between updates."""
    is_sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    if is_sharded:
        zero._set_fp32_optimizer_param_groups()  # type: ignore[union-attr]
    try:
        yield
    finally:
        if is_sharded:
            zero._clear_fp32_optimizer_param_groups()  # type: ignore[union-attr]


def show(zero: Any | None) -> None:
    """Copy the fp32 weights of ZeRO 1 to 3 to the model; collective."""
    if zero is None:
        return
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()
    for number in range(len(zero.fp32_partitioned_groups_flat)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()
