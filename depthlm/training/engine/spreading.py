"""Expert parallelism: the experts of a layer are spread over ranks, in DeepSpeed's expert groups.

With s ranks per layer, ranks 0 to s - 1 have one copy of all experts, ranks s to 2s - 1 the next. DeepSpeed calls these
expert parallel groups. The ranks with the same experts reduce their gradients, and are an expert data parallel group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthlm.config import Config
from depthlm.model import Decoder, initialize
from depthlm.model.experts import Experts, Spread, spread_of
from depthlm.model.parameters import Owned
from depthlm.training.engine.sharding import configure_deepspeed


def draw_spread(config: Config, model: Decoder, device: torch.device) -> None:
    """Give a model on meta its initial weights, of which each rank keeps only its own experts; collective.

    Every rank draws each weight as a whole, since its generator cannot skip to a part, but only one at a time.
    """
    import deepspeed
    from deepspeed.utils import groups

    configure_deepspeed(config)
    deepspeed.init_distributed()
    groups._create_expert_and_data_parallel(config.deepspeed.experts)
    group = groups._get_expert_parallel_group(group_name(config.deepspeed.experts))
    spread = Spread(group, torch.distributed.get_rank(group), config.deepspeed.experts)

    def place(owned: Owned, weight: Tensor) -> None:
        if isinstance(owned.owner, Experts):
            owned.owner.keep(owned.own_name, weight.to(device), spread)
        else:
            parameter = nn.Parameter(weight.to(device), owned.parameter.requires_grad)
            owned.owner.register_parameter(owned.own_name, parameter)

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device=device))
        if isinstance(module, Experts) and model.is_compiled:
            # how many tokens arrive is known only when they are sent
            module.exchange = torch.compiler.disable(module.exchange)
    initialize(model, config.seed, config.size.init_std, place)


def group_name(ranks: int) -> str:
    """Return DeepSpeed's name of the groups of experts that are spread over this many ranks."""
    return f"ep_size_{ranks}"


def reduction_group(weight: Tensor) -> Any:
    """Return the ranks that have the same weight, over which its gradient is reduced; None: all ranks."""
    spread = spread_of(weight)
    if spread is None:
        return None
    from deepspeed.utils import groups

    return groups._get_expert_data_parallel_group(group_name(spread.ranks))


def spread_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are spread over ranks, by name."""
    return {name: weight for name, weight in model.named_parameters() if spread_of(weight) is not None}


def mark_experts(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Mark spread weights and their optimizer groups as DeepSpeed's ZeRO 1 and 2 expect them."""
    for weight in spread_weights(model).values():
        weight.allreduce = False  # type: ignore[attr-defined]
        weight.group_name = group_name(spread_of(weight).ranks)  # type: ignore
    for group in optimizer.param_groups:
        if (spread := spread_of(group["params"][0])) is not None:
            group |= {"moe": True, "name": group_name(spread.ranks)}


@contextmanager
def experts_detected(model: Decoder) -> Iterator[None]:
    """Let DeepSpeed take spread experts for its own, which it recognizes by their class, while it builds an engine."""
    from deepspeed.runtime import engine

    original = engine.MoE
    engine.MoE = Experts if spread_weights(model) else original
    try:
        yield
    finally:
        engine.MoE = original


def total_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of a whole model; collective if experts are spread."""
    spread = [p for p in parameters if spread_of(p) is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if spread_of(p) is None and p.grad is not None])
    if not spread:
        return norm
    square = nn.utils.get_total_norm([p.grad for p in spread if p.grad is not None]).square()
    torch.distributed.all_reduce(square, group=spread_of(spread[0]).group)  # type: ignore[union-attr]
    return (norm.square() + square).sqrt()
