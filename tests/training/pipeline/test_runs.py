"""Runs in a pipeline: their files, and how they resume with other stages and without a pipeline."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

import depthlm
from depthlm.locations import REPOSITORY
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.pipeline.engine import PipelineEngine

from ..run_files import assert_close, bad_batches, checkpoint, curve, losses, states, weights

pytestmark = pytest.mark.slow
GIVEN = (
    "model=attention_residuals",
    "size.num_layers=4",
    "training.micro_batch_size=1",
    "training.max_steps=6",
    "training.validate_every=2",
)


def pipeline(stages: int, chunks: int) -> list[str]:
    return [f"training.pipeline.stages={stages}", f"training.pipeline.chunks={chunks}"]


def test_a_run_moves_between_pipelines_and_one_process(train_run):
    one = train_run(*GIVEN, name="one")
    parts = (1, 1, []), (3, 2, pipeline(2, 2)), (4, 2, pipeline(2, 1)), (5, 2, []), (6, 2, pipeline(2, 2))
    for stop, ranks, given in parts:
        moved = train_run(*GIVEN, *given, f"training.stop_after={stop}", ranks=ranks, name="moved")
    assert_close(moved, one, 1e-5, 1e-4)
    validation = [
        [row["validation/local/loss"] for row in read_metrics(run / "metrics.jsonl") if "validation/local/loss" in row]
        for run in (one, moved)
    ]
    assert len(validation[0]) == 3
    torch.testing.assert_close(validation[1], validation[0], rtol=1e-5, atol=0)
    files = [{str(file.relative_to(checkpoint(run))) for file in checkpoint(run).rglob("*.*")} for run in (one, moved)]
    assert files[0] == files[1]
    saved = [{name for name in states(run) if "/module/" in name or "/optimizer/" in name} for run in (one, moved)]
    assert saved[0] == saved[1]


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        # whose states are not contiguous
        ("backbone.dropout=0.2 optimizer=soap", 1e-3),
        ("model=mhc precision=bf16 data.document_mask=true", 3e-3),
        ("model=moda data.document_mask=true training.activation_checkpointing=selective optimizer=muon", 1e-3),
    ],
)
def test_options_of_a_run(train_run, overrides, tolerance):
    given = (*GIVEN, "training.max_steps=3", *overrides.split())
    one, two = train_run(*given, name="one"), train_run(*given, *pipeline(2, 2), ranks=2, name="two")
    torch.testing.assert_close(losses(two), losses(one), rtol=tolerance, atol=0)
    resumed = train_run(*given, *pipeline(2, 2), ranks=2, name="resumed", stops=(1, 3))
    assert curve(resumed) == curve(two)


def train_with_a_bad_gradient(overrides: list[str]) -> int:
    """Train with a gradient that is not finite on the last stage, in the second step."""
    average = PipelineEngine.average_gradients

    def average_and_spoil(engine: PipelineEngine) -> None:
        average(engine)
        if engine.global_steps == 1 and engine.layout.stage == 1:
            engine.model.final_norm.weight.grad.fill_(float("nan"))

    with mock.patch.object(PipelineEngine, "average_gradients", average_and_spoil):
        return train(depthlm.compose(overrides))


def test_all_stages_skip_a_gradient_that_is_not_finite_on_one(two_ranks, small_run, tmp_path):
    assert two_ranks(train_with_a_bad_gradient, small_run(*GIVEN, *pipeline(2, 2))) == [0, 0]
    assert [(row["step"], row["outcome"]) for row in bad_batches(tmp_path / "run")] == [(2, "skipped")]
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run").values())


def test_training_without_a_pipeline_imports_none_of_it(small_run):
    script = (
        "import sys, depthlm; from depthlm.training import train; assert train(depthlm.compose(sys.argv[1:])) == 0; "
        "assert not [name for name in sys.modules if 'pipelining' in name or 'training.pipeline' in name]"
    )
    command = [sys.executable, "-c", script, *small_run("training.max_steps=1")]
    assert subprocess.run(command, cwd=REPOSITORY).returncode == 0
