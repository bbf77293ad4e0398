"""Runs with a mixture of experts: two ranks and one, resumed runs, and the records of the routers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import depthlm
from depthlm.config import ConfigError
from depthlm.runs.records import read_metrics

from .run_files import assert_same, bad_batches, losses, train_three, weights

STEPS = 6
ROUTERS = ("backbone=qwen3_moe", "size.num_experts=4", "backbone.router_bias_rate=0.01", "training.log_every=1",
           f"training.max_steps={STEPS}", "training.checkpoint_every=100")  # fmt: skip


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of experts.jsonl."""
    return [json.loads(line) for line in (directory / "experts.jsonl").read_text().splitlines()]


def biases(directory: Path) -> list[torch.Tensor]:
    return [tensor for name, tensor in weights(directory).items() if name.endswith("bias_e")]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [("zero1", "bf16"), ("zero3", "fp32")])
def test_two_ranks_equal_one_and_a_resumed_run_equals_both(train_run, stage, precision):
    given = (*ROUTERS, f"deepspeed={stage}", f"precision={precision}")
    one, two, resumed = train_three(train_run, *given)
    rows = [records(path) for path in (one, two, resumed)]
    assert rows[1] == rows[2]
    assert [row["step"] for row in rows[0]] == list(range(1, STEPS + 1))
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    torch.testing.assert_close(losses(one), losses(two), rtol=tolerance, atol=0)
    if precision == "fp32":
        torch.testing.assert_close(rows[0][-1]["load"], rows[1][-1]["load"])
        assert_same(dict(enumerate(biases(one))), dict(enumerate(biases(two))))
    for bias_e in biases(two):
        assert bias_e.dtype == torch.float32
        torch.testing.assert_close(bias_e / 0.01, (bias_e / 0.01).round())
        assert bias_e.any()


def test_a_run_logs_the_routers_and_the_activated_parameters(train_run, capsys):
    run = train_run(*ROUTERS, "backbone.dense_layers=1", "training.max_steps=1")
    assert "activated by a token" in capsys.readouterr().out
    row = next(iter(read_metrics(run / "metrics.jsonl")))
    assert 1 <= row["router/largest_load"] <= 4
    assert row["router/balance_loss"] == pytest.approx(2, abs=0.4)
    record = records(run)[0]
    # one of two layers is dense
    assert [len(layer) for layer in record["load"]] == [4]
    assert sum(record["load"][0]) == pytest.approx(1)
    assert len(record["entropy"]) == len(record["bias"]) == 1


def test_a_skipped_step_does_not_change_the_biases(train_run):
    given = (*ROUTERS, "training.on_spike=skip", "training.spike_deviations=1e-3", "training.spike_window=4",
             "training.max_steps=12", "optimizer.lr=1e-9", "training.max_skipped=20")  # fmt: skip
    run = train_run(*given)
    rows = records(run)
    skipped = {row["step"] for row in bad_batches(run)}
    changes = {after["step"]: before["bias"] != after["bias"] for before, after in pairwise(rows)}
    assert skipped
    assert not any(changes[step] for step in skipped)
    assert any(changes.values())


def test_impossible_backbones_are_refused(small_run):
    for overrides, message in (
        (["backbone.mixers=[softmax]"], "must be a list of one or more of attention, latent, delta"),
        (["backbone.mixers=[latent]"], "backbone.position=rope: the keys of mixer latent are not rotated"),
        (["backbone.mixers=[delta]", "model=moda"], "attention of model=moda may read keys and values of other layers"),
        (["backbone.mixers=[attention,latent]", "backbone.position=none", "model=depth_attention"],
         "those of attention and latent differ in width"),
        (["backbone=qwen3_moe", "backbone.dropout=0.1"], "experts have none; give backbone.mlp=swiglu or relu"),
        (["backbone=qwen3_moe", "backbone.router_groups=3"], "must divide size.num_experts=8; allowed: 1, 2, 4, 8"),
        (["backbone=qwen3_moe", "backbone.router_groups=8"], "a group needs at least two of the 8 experts"),
        (["backbone=qwen3_moe", "backbone.router_groups=4", "size.experts_per_token=3"],
         "only 2 experts can be chosen"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            depthlm.compose(small_run(*overrides))
