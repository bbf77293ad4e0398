"""Runs with non-finite values or spikes at chosen steps, or that are killed at one; the same on every attempt."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch

import depthlm
from depthlm.training import train
from depthlm.training.engine.partitions import Fragment, Partition, partitions
from depthlm.training.trainer import Trainer

# the term added to the loss of a step, and the factor on one of its gradients
NONE = (0.0, 1.0)
KINDS = {"gradient": (0.0, float("nan")), "loss": (float("inf"), 1.0), "spike": (1e4, 1.0), "reduced": NONE}


def train_spoiled(
    overrides: list[str], spoiled: dict[int, str], ranks: Iterable[int] = (0, 1), killed_at: int | None = None
) -> int | str:
    """Train with these overrides. Returns the exit code, or "killed".

    spoiled: the bad steps (from 1), each with one of KINDS or, after its update, of DAMAGED; a bad loss has finite
    gradients, and "reduced" is a gradient that is bad only after the ranks have reduced it. ranks: the ranks on which
    they are bad. killed_at: the step during which the run is killed.
    """
    train_steps = Trainer.train_steps

    def spoil_and_train(trainer: Trainer) -> bool:
        spoils = torch.distributed.get_rank() in ranks

        def numbers() -> tuple[float, float]:
            step = trainer.progress.step + 1
            if step == killed_at:
                raise KeyboardInterrupt
            return KINDS.get(spoiled[step], NONE) if spoils and step in spoiled else NONE

        def spoil_loss(model: Any, inputs: Any, sums: Any) -> Any:
            return sums._replace(nll=sums.nll + numbers()[0]) if torch.is_grad_enabled() else sums

        engine, model = trainer.engine, trainer.engine.model
        step = engine.step

        def spoil_and_step(*arguments: Any) -> float:
            kind = spoiled.get(trainer.progress.step + 1) if spoils else None
            if kind == "reduced":
                reduced_gradient(engine).fill_(float("nan"))
            nll = step(*arguments)
            if kind in DAMAGED:
                DAMAGED[kind](engine).fill_(float("nan"))
            return nll

        engine.step = spoil_and_step
        model.final_norm.weight.register_hook(lambda gradient: gradient * numbers()[1])
        model.register_forward_hook(spoil_loss)
        return train_steps(trainer)

    with patch.object(Trainer, "train_steps", spoil_and_train):
        try:
            return train(depthlm.compose(overrides))
        except KeyboardInterrupt:
            return "killed"


def reduced_gradient(engine: Any) -> torch.Tensor:
    """Return a part of the reduced gradient that this rank has, before the update."""
    if engine.zero is None:
        return engine.model.final_norm.weight.grad
    if hasattr(engine.zero, "fp32_groups_gradients_flat"):
        return engine.zero.fp32_groups_gradients_flat[0]
    return engine.zero.averaged_gradients[0][0]


def weight(engine: Any) -> torch.Tensor:
    """Return a part of a weight that this rank updates."""
    if engine.zero is None:
        return engine.model.final_norm.weight.data[:1]
    part, (_, fragment) = own_fragment(engine)
    return part.flat.data[fragment.offset : fragment.offset + 1]


def state(engine: Any) -> torch.Tensor:
    """Return a part of a state of the optimizer on this rank."""
    if engine.zero is None:
        return engine.optimizer.state[engine.model.final_norm.weight]["exp_avg"][:1]
    part, (_, fragment) = own_fragment(engine)
    return engine.optimizer.state[part.flat]["exp_avg"][fragment.offset : fragment.offset + 1]


def own_fragment(engine: Any) -> tuple[Partition, tuple[torch.nn.Parameter, Fragment]]:
    """Return a partition of ZeRO 1 to 3, and a weight of which this rank has elements in it."""
    return next((part, own) for part in partitions(engine.zero) for own in part.local_fragments())


DAMAGED: dict[str | None, Callable[[Any], torch.Tensor]] = {"weight": weight, "state": state}
