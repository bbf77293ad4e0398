"""Updates on synthetic tokens, without a run directory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import depthlm
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.training.engine import Engine, build_engine
from depthlm.training.plan import Plan, learning_rate, make_plan
from depthlm.training.step import train_step

from ..options import configuration


def synthetic_tokens(config: Config, steps: int) -> torch.Tensor:
    """Return learnable tokens [steps, batch, T + 1], the same on every machine."""
    shape = (steps, config.training.batch_size, config.training.sequence_length + 1)
    noise = torch.randint(7, shape, generator=torch.Generator().manual_seed(0))
    return (torch.arange(shape[-1]) * 3 + noise) % config.size.vocab_size


def built(overrides: list[str], prepare: Callable[[nn.Module], Any] = lambda _: None) -> tuple[Config, Plan, Engine]:
    """Return a configuration, its plan and its engine. prepare: changes the model before the engine is built."""
    torch.set_num_threads(1)
    config = configuration(*overrides)
    start_distributed(ranks())
    plan, model = make_plan(config, ranks()), depthlm.build_model(config)
    prepare(model)
    return config, plan, build_engine(config, plan, model)


def updates(overrides: list[str], steps: int) -> tuple[list[float], Engine]:
    """Return the losses of `steps` updates on synthetic tokens, of which each rank has its share, and the engine."""
    config, plan, engine = built(overrides)
    curve = []
    for number, tokens in enumerate(synthetic_tokens(config, steps)):
        engine.set_learning_rate(learning_rate(config, plan, number))
        batch = tokens.chunk(plan.world_size)[ranks().rank].view(plan.accumulation, plan.micro_batch_size, -1)
        curve.append(float(train_step(engine, batch, plan, 0.0)) / plan.tokens_per_step)
    return curve, engine


def losses(overrides: list[str], steps: int) -> list[float]:
    """Return the losses of `steps` updates on synthetic tokens."""
    return updates(overrides, steps)[0]
