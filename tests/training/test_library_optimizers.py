"""The optimizers of pytorch_optimizer: other ranks, resumed runs, averages of the weights, and what is refused."""

from pathlib import Path

import pytest
import torch

from depthlm.evaluation.evaluate import Evaluate, evaluate
from depthlm.runs.records import read_metrics

from .run_files import assert_same_run, curve, weights

pytest.importorskip("pytorch_optimizer")

STEPS = 6


def settings(optimizer: str, stage: int, *more: str) -> tuple[str, ...]:
    return (f"optimizer={optimizer}", f"deepspeed=zero{stage}", f"training.max_steps={STEPS}",
            "schedule=constant", "training.validate_every=2", *more)  # fmt: skip


def losses(directory: Path) -> list[float]:
    rows = list(read_metrics(directory / "metrics.jsonl"))
    return [row["loss"] for row in rows] + [row["validation/local/loss"] for row in rows if row["step"] % 2 == 0]


def assert_close(one: Path, other: Path, optimizer: str) -> None:
    # the eigenvectors of SOAP's first preconditioners, which have a low rank, depend on rounding
    tolerance = 1e-2 if optimizer == "soap" else 1e-5
    torch.testing.assert_close(losses(one), losses(other), rtol=tolerance, atol=0)
    first, second = weights(one), weights(other)
    assert all(torch.dist(first[name], second[name]) <= 100 * tolerance * second[name].norm() for name in second)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "stage"), [("ademamix", 1), ("schedule_free", 3), ("soap", 0)])
def test_two_ranks_equal_one_and_resume_bit_for_bit_and_a_sharded_run_on_one_rank(train_run, optimizer, stage):
    given = settings(optimizer, stage)
    one = train_run(*settings(optimizer, 0), name="one")
    straight = train_run(*given, ranks=2, name="straight")
    resumed = train_run(*given, ranks=2, name="resumed", stops=(3, STEPS))
    assert losses(straight)[STEPS - 1] < losses(straight)[0]
    assert_close(straight, one, optimizer)
    assert losses(straight) == losses(resumed)
    assert_same_run(straight, resumed)
    if stage:
        for count, stop in ((2, 2), (1, 4), (2, STEPS)):
            moved = train_run(*given, f"training.stop_after={stop}", ranks=count, name="moved")
        assert_close(moved, one, optimizer)


def test_averages_are_exported_and_validations_leave_no_trace(train_run):
    once, often = (
        train_run(
            *settings("schedule_free", 0, f"training.validate_every={every}", f"training.checkpoint_every={every}"),
            "training.validation_tokens=4K", name=name,
        )
        for name, every in (("once", 100), ("often", 1))
    )  # fmt: skip
    assert curve(often) == curve(once)
    # the average of the iterates z, by the definition: y = (1 - beta) z + beta x
    file = once / "checkpoints/step-00000006/deepspeed/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    trained, exported = state["module"], weights(once)
    names = [name for group in state["optimizer"]["param_groups"] for name in group["names"]]
    for index, name in enumerate(names):
        z = state["optimizer"]["state"][index]["z"]
        torch.testing.assert_close(0.1 * z + 0.9 * exported[name], trained[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(trained[name], exported[name]) for name in names)
    summary = list(read_metrics(once / "metrics.jsonl"))[-1]
    measured = evaluate(Evaluate(run=str(once)))
    assert measured["validation/local/loss"] == pytest.approx(summary["validation/local/loss"], rel=1e-5)
