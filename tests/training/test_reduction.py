"""At ZeRO 0, gradients are averaged during the backward pass, and equal those that DeepSpeed averages after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import depthlm
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.training.engine import Engine
from depthlm.training.engine.reduction import buckets_of

from .synthetic import built, synthetic_tokens

DEEPSPEED_REDUCES = mock.patch("depthlm.training.engine.deepspeed.reducer_of", return_value=None)
# two micro-batches per step, and several buckets
SMALL = ("deepspeed=zero0", "deepspeed.reduce_bucket_size=20000", "training.micro_batch_size=1")


def start(overrides: list[str], prepare: Callable[[nn.Module], Any] = lambda _: None) -> tuple[Any, torch.Tensor]:
    """Return an engine, and this rank's tokens [2, accumulation, micro_batch, T + 1] of two steps."""
    config, plan, engine = built(overrides, prepare)
    own = synthetic_tokens(config, 2).unflatten(1, (plan.world_size, plan.accumulation, plan.micro_batch_size))
    return engine, own[:, ranks().rank]


def backward(engine: Engine, tokens: torch.Tensor) -> None:
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]).nll)


def gradients(overrides: list[str], prepare: Callable[[nn.Module], Any] = lambda _: None) -> dict[str, torch.Tensor]:
    """Return the gradients of two steps as the optimizer reads them, by the parameter's name and the step."""
    engine, steps = start(overrides, prepare)
    found = {}
    for step, batch in enumerate(steps):
        engine.set_learning_rate(0.1)
        for tokens in batch:
            backward(engine, tokens)
            last = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
            engine.step()
        found |= {f"{name} in step {step}": gradient for name, gradient in last.items()}
    assert engine.reducer is None or len(engine.reducer.buckets) > 3
    engine.destroy()
    return found


def unequal(overrides: list[str], prepare: Callable[[nn.Module], Any] = lambda _: None) -> list[str]:
    """Return which gradients are not those of DeepSpeed's own reduction."""
    with DEEPSPEED_REDUCES:
        expected = gradients(overrides, prepare)
    actual = gradients(overrides, prepare)
    assert actual.keys() == expected.keys()
    return [name for name, gradient in actual.items() if not torch.equal(gradient, expected[name])]


@pytest.mark.parametrize(
    ("accumulation", "kind"),
    [
        (2, "precision=fp32"),
        pytest.param(1, "precision=bf16 deepspeed.communication_data_type=bf16", marks=pytest.mark.slow),
        pytest.param(
            2,
            "model.loops=2 backbone.tie_embeddings=true training.activation_checkpointing=true",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_equal_those_that_deepspeed_reduces(two_ranks, small_run, accumulation, kind):
    overrides = small_run(*SMALL, *kind.split(), "model=dca", f"training.batch_size={2 * accumulation}")
    assert two_ranks(unequal, overrides) == [[], []]


def add_parameters(model: nn.Module) -> None:
    """Add a parameter that only rank 0 uses, and one that no rank uses, in the middle of the others."""
    for layer in model.layers:
        layer.extra = nn.Parameter(torch.ones(3))

    def use(model: Any, inputs: Any, sums: Any) -> Any:
        return sums._replace(nll=sums.nll + model.layers[0].extra.sum()) if ranks().rank == 0 else None

    model.register_forward_hook(use)


def unequal_with_unused(overrides: list[str]) -> list[str]:
    return unequal(overrides, add_parameters)


def test_a_parameter_without_a_gradient_counts_as_zero_as_in_deepspeed(two_ranks, small_run):
    assert two_ranks(unequal_with_unused, small_run(*SMALL)) == [[], []]


@contextmanager
def recorded(happened: list[Any]) -> Iterator[None]:
    """Append the size of every reduction that starts."""
    reduce = torch.distributed.all_reduce

    def record(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        happened.append(tensor.numel())
        return reduce(tensor, *arguments, **settings)

    with mock.patch("torch.distributed.all_reduce", record):
        yield


def events(overrides: list[str]) -> list[Any]:
    """Return the events of two steps in order: reductions, the first weight's gradient, ends of backward passes."""
    engine, steps = start(overrides)
    happened: list[Any] = []
    embedding = engine.model.embedding.weight
    hook = embedding.register_post_accumulate_grad_hook(lambda _: happened.append("first weight"))
    with recorded(happened):
        for tokens in steps.flatten(0, 1):
            backward(engine, tokens)
            happened.append("end")
            engine.step()
    hook.remove()
    engine.destroy()
    return happened


def test_all_buckets_but_the_last_are_reduced_while_the_backward_pass_runs(two_ranks, small_run):
    overrides = small_run(*SMALL)
    model = depthlm.build_model(depthlm.compose(overrides))
    *sizes, last = [sum(p.numel() for p in bucket) for bucket in buckets_of(model.parameters(), 20_000)]
    # hooks are called in the order in which they were registered, so that the last reduction starts before ours; the
    # one value is whether the norm is finite on all ranks
    step = ["first weight", "end", *sizes, last, "first weight", "end", 1]
    assert two_ranks(events, overrides) == [2 * step, 2 * step]


def test_a_single_rank_reduces_nothing(small_run):
    start_distributed(ranks())
    assert unequal_with_unused(small_run(*SMALL)) == []
    assert {*events(small_run(*SMALL))} == {"first weight", "end"}
