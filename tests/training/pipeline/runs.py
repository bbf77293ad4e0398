"""Updates in a pipeline, and by a plain loop on one rank, on synthetic tokens."""

from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed import P2POp

import depthlm
from depthlm.config import Config
from depthlm.distributed.launchers import SINGLE_RANK, ranks
from depthlm.model import Decoder
from depthlm.model.parameters import generator_for
from depthlm.optimizers.build import build_optimizer
from depthlm.training.pipeline.engine import PipelineEngine, draw_stage
from depthlm.training.pipeline.stage import Stage
from depthlm.training.plan import learning_rate, make_plan
from depthlm.training.step import train_step

from ...options import configuration
from ..synthetic import synthetic_tokens

STEPS = 10
SHAPE = [
    "size=micro", "size.num_layers=4", "size.hidden_size=32", "size.intermediate_size=48", "size.num_heads=4",
    "size.num_kv_heads=2", "size.head_size=8", "size.vocab_size=320", "size.init_std=0.1", "data.tokenizer=bytes",
    "precision=fp32", "training.sequence_length=16", "training.batch_size=4", "training.micro_batch_size=1",
    "schedule=constant", "training.gradient_clipping=0.5", "optimizer.lr=0.01",
]  # fmt: skip


class Updates(NamedTuple):
    """losses: of each step. gradients: of the first. sent, returned: values per token, by chunk."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    sent: dict[int, float]
    returned: dict[int, float]


def awaken(model: Decoder, dtype: torch.dtype) -> None:
    """Add noise to the parameters of connections, which depends on their names, and change the dtype of all."""
    model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("connections.") and not parameter.is_meta:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator_for(1, name)).to(dtype)


def prepare(overrides: list[str]) -> tuple[Config, Decoder, list[torch.Tensor]]:
    torch.set_num_threads(1)
    config = configuration(*SHAPE, *overrides)
    model = depthlm.build_model(config, "meta")
    model.checkpoint_activations(config.training.activation_checkpointing)
    model.mask_documents(config.data.document_mask, end_of_text=7)
    return config, model, [*synthetic_tokens(config, STEPS)]


def arrays(named: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: x.detach().double().numpy().copy() for name, x in named.items()}


def plain_updates(overrides: list[str], dtype: torch.dtype) -> Updates:
    """Take the steps on one rank: one forward and backward pass of the whole batch, clipping, and the optimizer."""
    config, model, batches = prepare(overrides)
    model.to_empty(device="cpu")
    depthlm.model.initialize(model, config.seed, config.size.init_std, backbone=config.backbone)
    awaken(model, dtype)
    optimizer = build_optimizer(model, config.optimizer, STEPS)
    plan, losses, first = make_plan(config, SINGLE_RANK), [], {}
    for number, tokens in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, plan, number) * group["lr_scale"]
        sums = model(tokens[:, :-1], tokens[:, 1:])
        (sums.total(config.training.z_loss) / sums.tokens).backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        first = first or arrays({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        nn.utils.clip_grad_norm_(model.parameters(), config.training.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sums.nll.detach() / sums.tokens))
    return Updates(losses, first, arrays(dict(model.named_parameters())), {}, {})


def pipeline_updates(overrides: list[str], dtype: torch.dtype) -> Updates:
    """Take the same steps in a pipeline; collective. Gradients are those of this rank, weights are on rank 0."""
    config, model, batches = prepare(overrides)
    plan, sent, returned = make_plan(config, ranks()), Counter(), Counter()
    layout = draw_stage(config, model, torch.device("cpu"))
    awaken(model, dtype)
    engine = PipelineEngine(config, plan, model, layout, torch.device("cpu"))
    losses, first = [], {}

    def counted(name: str, counter: Counter[int]) -> Any:
        send = getattr(Stage, name)

        def count(stage: Stage, batch: int) -> list[P2POp]:
            operations = send(stage, batch)
            counter[stage.chunk.number] += sum(op.tensor.numel() for op in operations)
            return operations

        return mock.patch.object(Stage, name, count)

    with counted("get_fwd_send_ops", sent), counted("get_bwd_send_ops", returned):
        for number, tokens in enumerate(batches):
            engine.set_learning_rate(learning_rate(config, plan, number))
            share = tokens.chunk(plan.replicas)[ranks().rank // plan.stages]
            batch = share.view(plan.accumulation, plan.micro_batch_size, -1)
            if not first:
                engine.run_batch(batch, None)
                first = arrays({name: p.grad for name, p in engine.parameters.items()})
                engine.optimizer.zero_grad()
                number_of_tokens = batch[..., 1:].numel()
                per_token = [{c: n / number_of_tokens for c, n in each.items() if n} for each in (sent, returned)]
            nll = train_step(engine, batch, plan, config.training.z_loss)
            losses.append(nll / plan.tokens_per_step)
    return Updates(losses, first, arrays(engine.weights()), *per_token)


def all_pipeline_updates(runs: list[list[str]], dtype: torch.dtype) -> list[Updates]:
    """Return the updates of several runs."""
    return [pipeline_updates(overrides, dtype) for overrides in runs]
