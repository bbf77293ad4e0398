"""Sublayer norms equal plain PyTorch's, and measuring them does not change the run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import depthlm
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.model import Observer, SublayerSpec
from depthlm.training.engine import build_engine
from depthlm.training.monitoring.metrics import SublayerNormMeter
from depthlm.training.plan import make_plan
from depthlm.training.step import train_step

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
        (["training.micro_batch_size=1", "training.activation_checkpointing=true", "model=mhc"], 1e-5),
        (["deepspeed=zero3", "model=dca", "training.micro_batch_size=2"], 1e-5),
        (["deepspeed=zero1", "precision=fp16", "precision.initial_scale_power=8", "training.micro_batch_size=2"], 2e-2),
        pytest.param(["precision=bf16", "model.loops=2", "backbone=olmo2"], 5e-2, marks=pytest.mark.slow),
        pytest.param(["training.compile=true"], 1e-4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_norms_equal_plain_pytorch(small_run, settings, tolerance):
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


def test_measuring_does_not_change_the_curve_and_resuming_truncates_rows(train_run):
    settings = ["model=attention_residuals", "training.max_steps=6", "training.checkpoint_every=4"]
    without = train_run(*settings, name="without")
    assert not (without / "blocks.jsonl").exists()
    measured = [*settings, "training.log_blocks_every=2"]
    run = train_run(*measured, "training.stop_after=4")
    assert [row["step"] for row in rows(run)] == [1, 2, 4]
    before = (run / "blocks.jsonl").read_text()
    # rows that a killed run wrote after its checkpoint
    beyond = before.splitlines(keepends=True)[-1].replace('"step": 4', '"step": 5')
    (run / "blocks.jsonl").write_text(before + beyond + '{"st')
    train_run(*measured)
    assert [row["step"] for row in rows(run)] == [1, 2, 4, 6]
    assert (run / "blocks.jsonl").read_text().startswith(before)
    assert curve(run) == curve(without)


def test_a_skipped_batch_has_no_gradient_norms(small_run, tmp_path):
    overrides = small_run("training.max_steps=3", "training.log_blocks_every=1")
    assert train_spoiled(overrides, {2: "loss"}) == 0
    logged = rows(tmp_path / "run")
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert logged[1]["mlp_gradient"] == [None, None]
    assert all(math.isfinite(value) for value in logged[1]["mlp_output"] + logged[2]["mlp_gradient"])


@pytest.mark.slow
def test_two_ranks_measure_the_same_as_one(train_run):
    settings = ["training.max_steps=2", "training.log_blocks_every=2", "training.micro_batch_size=1"]
    one, two = (rows(train_run(*settings, ranks=count, name=str(count))) for count in (1, 2))
    for of_one, of_two in zip(one, two, strict=True):
        for name, values in of_one.items():
            torch.testing.assert_close(of_two[name], values, rtol=1e-4, atol=0)
