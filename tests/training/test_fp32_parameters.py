"""Parameters that a module declares in `fp32_parameters` stay in fp32 in bf16 and fp16 at ZeRO 1 to 3."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthlm
from depthlm.model.parameters import fp32_parameters, optimizer_groups
from depthlm.training.step import train_step

from .run_files import assert_same_run, weights
from .run_files import losses as run_losses
from .synthetic import built, losses, synthetic_tokens

MODELS = {
    "mhc": ["model=mhc", "model.connection.collapse=learned"],
    "hyper_connections": ["model=hyper_connections"],
    "static": ["model=hyper_connections", "model.connection.dynamic=false"],
    "kimi_linear": ["backbone=kimi_linear"],
}
SCALE = 2**8


def slow(*cases: tuple[str, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def start(overrides: list[str], change: Callable[[nn.Module], None] = lambda _: None) -> tuple[Any, ...]:
    config, plan, engine = built(overrides, change)
    engine.set_learning_rate(1e-3)
    return config, plan, engine


@pytest.mark.parametrize(
    ("stage", "precision", "model"),
    [
        ("zero3", "bf16", "mhc"),
        *slow(
            ("zero1", "bf16", "kimi_linear"),
            ("zero2", "bf16", "hyper_connections"),
            ("zero2", "fp16", "static"),
            ("zero3_offload", "fp16", "mhc"),
        ),
    ],
)
@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_updates_equal_adamw_in_fp32_on_the_same_gradients(small_run, stage, precision, model):
    config, plan, engine = start(
        small_run(
            f"deepspeed={stage}", f"precision={precision}", *MODELS[model], "training.gradient_clipping=0",
            "training.micro_batch_size=2", "precision.initial_scale_power=8",
        )
    )  # fmt: skip
    initial = depthlm.build_model(config)
    expected = {name: p.detach().clone().requires_grad_() for name, p in fp32_parameters(initial).items()}
    decays = {
        name: group["weight_decay"]
        for group in optimizer_groups(initial, config.optimizer.weight_decay)
        for name in group["names"]
    }
    groups = [{"params": [parameter], "weight_decay": decays[name]} for name, parameter in expected.items()]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=config.optimizer.betas, eps=config.optimizer.eps)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    sums: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        assert gradient.dtype == torch.float32
        # ranks send gradients in 16 bits: at stage 1 that of a batch, else that of each micro-batch
        sums[name] = sums.get(name, torch.zeros(())) + (gradient if stage == "zero1" else gradient.to(half).float())

    for name, parameter in fp32_parameters(engine.model).items():
        parameter.register_hook(lambda gradient, name=name: add(name, gradient))
    for tokens in synthetic_tokens(config, 4):
        sums.clear()
        train_step(engine, tokens.view(plan.accumulation, plan.micro_batch_size, -1), plan, 0.0)
        for name, parameter in expected.items():
            parameter.grad = sums[name].to(half).float() if stage == "zero1" else sums[name]
            parameter.grad /= SCALE if precision == "fp16" else 1
        adamw.step()
    actual = engine.weights()
    for name, parameter in expected.items():
        torch.testing.assert_close(actual[name], parameter.detach(), rtol=1e-6, atol=1e-6)
    rounded = torch.cat([(actual[name].to(half) - actual[name]).flatten() for name in expected])
    assert rounded.abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "model"), [("zero2", "mhc"), ("zero3", "kimi_linear")])
def test_runs_resume_bit_for_bit_and_on_other_ranks(train_run, stage, model):
    given = (f"deepspeed={stage}", "precision=bf16", *MODELS[model], "training.max_steps=6",
             "training.micro_batch_size=1", "training.validate_every=3")  # fmt: skip
    two = train_run(*given, ranks=2, name="two")
    resumed = train_run(*given, ranks=2, name="resumed", stops=(3, 6))
    assert_same_run(two, resumed)
    loaded, _ = depthlm.load(two)
    for name, parameter in fp32_parameters(loaded).items():
        assert weights(two)[name].dtype == torch.float32
        assert torch.equal(weights(two)[name], parameter)
    train_run(*given, "training.stop_after=3", ranks=2, name="moved")
    moved = train_run(*given, name="moved")
    assert "1 rank x 4" in (moved / "train.log").read_text()
    torch.testing.assert_close(run_losses(moved), run_losses(two), rtol=3e-3, atol=0)


def test_an_earlier_engine_under_autocast_changes_nothing(small_run):
    # as in a sweep: at ZeRO 0, bf16 means autocast, which DeepSpeed remembers in a global variable
    overrides = small_run("deepspeed=zero2", "precision=bf16", *MODELS["mhc"])
    expected = losses(overrides, 2)
    losses([*overrides, "deepspeed=zero0"], 1)
    assert losses(overrides, 2) == expected
