"""Sublayer norms equal plain PyTorch's, and measuring them does not change the run."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import depthlm
from depthlm.config.keys import on_resume
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.model import Observer, SublayerSpec
from depthlm.training import train
from depthlm.training.engine import build_engine
from depthlm.training.monitoring.meters import SublayerNormMeter
from depthlm.training.plan import make_plan
from depthlm.training.step import train_step

from ...two_ranks import TwoRanks, train_on_ranks
from ..run_files import curve
from ..spoiled import train_spoiled
from ..synthetic import synthetic_tokens

DEEP = "size.num_layers=3"


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "blocks.jsonl").read_text().splitlines()]


def expected_row(overrides: list[str]) -> dict[str, list[float]]:
    """Compute the norms with plain PyTorch in one batch: of each sublayer's output, and of its gradient by autograd."""
    config = depthlm.compose(overrides)
    model, written = depthlm.build_model(config), {}

    class Keep(Observer):
        def write(self, spec: SublayerSpec, output_btd: torch.Tensor) -> None:
            written[spec.layer, spec.kind] = output_btd

    tokens = synthetic_tokens(config, 1)[0]
    sums = model(tokens[:, :-1], tokens[:, 1:], observer=Keep())
    gradients = torch.autograd.grad(sums.nll / sums.tokens, list(written.values()))
    norms: dict[str, list[float]] = {}
    for quantity, tensors in (("output", written.values()), ("gradient", gradients)):
        for (_, kind), tensor in zip(written, tensors, strict=True):
            norms.setdefault(f"{kind}_{quantity}", []).append(tensor.square().mean().sqrt().item())
    return norms


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (["training.micro_batch_size=1"], 1e-5),
        (["training.activation_checkpointing=true", "model=mhc"], 1e-5),
        (["deepspeed=zero3", "model=dca", "training.micro_batch_size=2"], 1e-5),
        (["deepspeed=zero1", "precision=fp16", "precision.initial_scale_power=8", "training.micro_batch_size=2"], 2e-2),
        (["precision=bf16", "model.loops=2", "backbone=olmo2"], 5e-2),
        pytest.param(["training.compile=true"], 1e-4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_norms_equal_plain_pytorch(small_run: Callable[..., list[str]], settings: list[str], tolerance: float) -> None:
    torch.set_num_threads(1)
    overrides = small_run(DEEP, *settings)
    config = depthlm.compose(overrides)
    start_distributed(ranks())
    plan, model = make_plan(config, ranks()), depthlm.build_model(config)
    model.activation_checkpointing = config.training.activation_checkpointing
    if config.training.compile is True:
        from depthlm.model import compile_sublayers

        compile_sublayers(model)
    engine = build_engine(config, plan, model)
    meter = SublayerNormMeter(config.model.loops * 3, torch.device("cpu"))
    scale = engine.loss_scale
    batch = synthetic_tokens(config, 1)[0].view(plan.accumulation, plan.micro_batch_size, -1)
    train_step(engine, batch, plan, 0.0, observer=meter)
    actual, expected = meter.row(scale), expected_row(overrides)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert len(values) == config.model.loops * 3
        torch.testing.assert_close(actual[name], values, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(["deepspeed=zero3", "training.activation_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param(["deepspeed=zero1", "precision=bf16"], marks=pytest.mark.slow),
    ],
)
def test_measuring_does_not_change_the_curve_and_resuming_truncates_rows(
    small_run: Callable[..., list[str]], tmp_path: Path, settings: list[str]
) -> None:
    settings = ["model=attention_residuals", "training.max_steps=6", "training.checkpoint_every=4", *settings]
    assert train(depthlm.compose(small_run(*settings, name="without"))) == 0
    assert not (tmp_path / "without/blocks.jsonl").exists()
    measured = [*settings, "training.log_blocks_every=2"]
    assert train(depthlm.compose(small_run(*measured, "training.stop_after=4", name="with"))) == 0
    assert [row["step"] for row in rows(tmp_path / "with")] == [1, 2, 4]
    before = (tmp_path / "with/blocks.jsonl").read_text()
    # rows that a killed run wrote after its checkpoint
    beyond = before.splitlines(keepends=True)[-1].replace('"step": 4', '"step": 5')
    (tmp_path / "with/blocks.jsonl").write_text(before + beyond + '{"st')
    assert train(depthlm.compose(small_run(*measured, name="with"))) == 0
    assert [row["step"] for row in rows(tmp_path / "with")] == [1, 2, 4, 6]
    assert (tmp_path / "with/blocks.jsonl").read_text().startswith(before)
    assert curve(tmp_path / "with") == curve(tmp_path / "without")


def test_a_skipped_batch_has_no_gradient_norms(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    overrides = small_run("training.max_steps=3", "training.log_blocks_every=1")
    assert train_spoiled(overrides, {2: "loss"}) == 0
    logged = rows(tmp_path / "run")
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert logged[1]["mlp_gradient"] == [None, None]
    assert all(math.isfinite(value) for value in logged[1]["mlp_output"] + logged[2]["mlp_gradient"])


@pytest.mark.parametrize("stage", ["zero0", pytest.param("zero3", marks=pytest.mark.slow)])
def test_two_ranks_measure_the_same_as_one(
    two_ranks: TwoRanks, small_run: Callable[..., list[str]], tmp_path: Path, stage: str
) -> None:
    settings = ["training.max_steps=2", "training.log_blocks_every=2", "training.micro_batch_size=1"]
    assert train(depthlm.compose(small_run(*settings, name="one"))) == 0
    assert two_ranks(train_on_ranks, small_run(*settings, f"deepspeed={stage}", name="two")) == [0, 0]
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for name, values in one.items():
            torch.testing.assert_close(two[name], values, rtol=1e-4, atol=0)


def test_log_blocks_every_does_not_affect_the_result() -> None:
    assert on_resume("training.log_blocks_every") == "free"
