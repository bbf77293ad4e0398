"""The logic of the dynamic fp16 loss scale, computed on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import depthlm
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.runs.records import read_metrics
from depthlm.training import FAILED
from depthlm.training.engine import build_engine
from depthlm.training.plan import make_plan
from depthlm.training.step import train_step

from .run_files import Overrides, assert_same, bad_batches, curve, manifest, weights
from .spoiled import train_spoiled
from .synthetic import synthetic_tokens

pytestmark = pytest.mark.usefixtures("fp16_on_the_cpu")


@pytest.fixture
def scaled_steps(small_run: Overrides) -> Callable[..., Any]:
    """Take one step per letter, g with a finite gradient, o with an overflow. Returns the loss scale before each step
    and at the end."""

    def steps(kinds: str, *overrides: str) -> list[float]:
        config = depthlm.compose(small_run("precision=fp16", *overrides))
        start_distributed(ranks())
        plan, scales = make_plan(config, ranks()), []
        engine = build_engine(config, plan, depthlm.build_model(config))
        factor = [1.0]
        engine.model.final_norm.weight.register_hook(lambda gradient: gradient * factor[0])
        for kind, tokens in zip(kinds, synthetic_tokens(config, len(kinds)), strict=True):
            factor[0] = 1.0 if kind == "g" else float("inf")
            before = engine.weights()
            scales.append(engine.loss_scale)
            train_step(engine, tokens[None], plan, 0.0)
            assert engine.step_applied() == (kind == "g")
            changed = any(not torch.equal(before[name], value) for name, value in engine.weights().items())
            assert changed == (kind == "g")
        return [*scales, engine.loss_scale]

    return steps


@pytest.mark.parametrize("stage", ["zero1", pytest.param("zero3", marks=pytest.mark.slow)])
def test_the_scale_halves_on_overflows_to_its_smallest_and_doubles_after_its_window(scaled_steps, stage):
    settings = ["precision.initial_scale_power=8", "precision.loss_scale_window=3", f"deepspeed={stage}"]
    # hysteresis ignores the first overflow, and the first one after the scale has doubled
    scales = scaled_steps("ooggggoo", "precision.hysteresis=2", *settings)
    assert scales == [256, 256, 128, 128, 128, 128, 256, 256, 128]
    smallest = ["precision.min_loss_scale=128", "precision.hysteresis=1"]
    assert scaled_steps("ooog", *settings, *smallest) == [256, 128, 128, 128, 128]


@pytest.mark.parametrize("stage", ["zero1", pytest.param("zero3", marks=pytest.mark.slow)])
def test_the_update_at_which_the_scale_doubles_is_that_of_a_constant_scale(small_run, stage):
    found = []
    for window in (2, 1000):
        settings = [f"precision.loss_scale_window={window}", "precision.initial_scale_power=8", f"deepspeed={stage}"]
        config = depthlm.compose(small_run("precision=fp16", "training.gradient_clipping=0", *settings))
        start_distributed(ranks())
        plan, norms = make_plan(config, ranks()), []
        engine = build_engine(config, plan, depthlm.build_model(config))
        engine.set_learning_rate(0.01)
        for tokens in synthetic_tokens(config, 5):
            train_step(engine, tokens[None], plan, 0.0)
            norms.append(engine.grad_norm())
        assert (engine.loss_scale > 256) == (window == 2)
        found.append((norms, engine.weights()))
    (norms, weights), (expected_norms, expected) = found
    assert norms == pytest.approx(expected_norms, rel=0.01)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-3)


FP16 = ("precision=fp16", "deepspeed=zero1", "precision.initial_scale_power=4", "precision.hysteresis=1",
        "training.max_steps=12", "training.checkpoint_every=5", "training.keep_last=9")  # fmt: skip


def test_an_overflow_is_no_bad_batch_until_the_scale_is_the_smallest(small_run, tmp_path, capsys):
    overrides = small_run(*FP16, "training.on_nonfinite=rewind", "precision.min_loss_scale=4", "training.max_skipped=1")
    assert train_spoiled(overrides, dict.fromkeys((3, 4, 6, 7), "gradient")) == FAILED
    # two overflows lower the scale to 4, where two bad gradients in a row end the run
    scales = [row["loss_scale"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert scales == [16, 16, 16, 8, 4, 4]
    assert [row["step"] for row in bad_batches(tmp_path / "run")] == [6, 7]
    output = capsys.readouterr().out
    assert "step 4 skipped: its gradient overflows fp16 at a loss scale of 8, which is too large" in output
    reason = "the norm of its gradient is not finite, at the smallest"
    assert f"2 bad batches in a row, the last at step 7: {reason}" in output
    assert "precision.min_loss_scale=4" in output


@pytest.mark.parametrize("stage", ["zero1", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_run_in_fp16_resumes_and_rewinds_bit_for_bit(small_run, tmp_path, stage):
    overrides = [*FP16, f"deepspeed={stage}", "precision.loss_scale_window=2", "training.on_nonfinite=rewind"]
    spoiled = {3: "gradient", 8: "loss"}
    assert train_spoiled(small_run(*overrides, name="straight"), spoiled) == 0
    assert train_spoiled(small_run(*overrides, "training.stop_after=4"), spoiled) == 0
    assert train_spoiled(small_run(*overrides), spoiled, killed_at=10) == "killed"
    assert train_spoiled(small_run(*overrides), spoiled) == 0
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert curve(run) == curve(straight)
    scales = [[row["loss_scale"] for row in read_metrics(folder / "metrics.jsonl")] for folder in (run, straight)]
    assert scales[0] == scales[1]
    assert len(set(scales[0])) > 2
    assert manifest(run)["rewound"] == [[5, 8]]
    assert_same(weights(run), weights(straight))
