"""The optimizers of pytorch_optimizer: other ranks, resumed runs, averages of the weights, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.evaluation.evaluate import Evaluate, evaluate
from depthlm.runs.records import read_metrics
from depthlm.training import train

from ..two_ranks import TwoRanks, train_on_ranks
from .run_files import assert_same, curve, states, weights

pytest.importorskip("pytorch_optimizer")

Overrides = Callable[..., list[str]]
STEPS = 6


def run(
    overrides: Overrides, two_ranks: TwoRanks, ranks: int, stage: int, optimizer: str, *more: str, name: str
) -> None:
    given = overrides(f"optimizer={optimizer}", f"deepspeed=zero{stage}", f"training.max_steps={STEPS}",
                      "schedule=constant", "training.validate_every=2", *more, name=name)  # fmt: skip
    if ranks == 2:
        assert two_ranks(train_on_ranks, given) == [0, 0]
    else:
        assert train(depthlm.compose(given)) == 0


def losses(directory: Path) -> list[float]:
    rows = list(read_metrics(directory / "metrics.jsonl"))
    return [row["loss"] for row in rows] + [row["validation/local/loss"] for row in rows if row["step"] % 2 == 0]


def assert_close(one: Path, other: Path, optimizer: str) -> None:
    # the eigenvectors of SOAP's first preconditioners, which have a low rank, depend on rounding
    tolerance = 1e-2 if optimizer == "soap" else 1e-5
    torch.testing.assert_close(losses(one), losses(other), rtol=tolerance, atol=0)
    first, second = weights(one), weights(other)
    assert all(torch.dist(first[name], second[name]) <= 100 * tolerance * second[name].norm() for name in second)


SHARDED = ("ademamix", "schedule_free")
CASES = [("schedule_free", 3, 2)]
OTHER_CASES = [
    *(("ademamix", stage, 2) for stage in (1, 3)),
    *(("schedule_free", stage, 2) for stage in (0, 2)),
    *(("soap", 0, ranks) for ranks in (1, 2)),
]


@pytest.mark.parametrize(
    ("optimizer", "stage", "ranks"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CASES)]
)
def test_a_run_equals_one_rank_and_resumes_bit_for_bit(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, optimizer: str, stage: int, ranks: int
) -> None:
    run(small_run, two_ranks, 1, 0, optimizer, name="one")
    run(small_run, two_ranks, ranks, stage, optimizer, name="straight")
    for stop in (3, STEPS):
        run(small_run, two_ranks, ranks, stage, optimizer, f"training.stop_after={stop}", name="resumed")
    one, straight, resumed = (tmp_path / name for name in ("one", "straight", "resumed"))
    assert losses(straight)[STEPS - 1] < losses(straight)[0]
    assert_close(straight, one, optimizer)
    assert losses(straight) == losses(resumed)
    assert curve(straight) == curve(resumed)
    assert_same(weights(straight), weights(resumed))
    assert_same(states(straight), states(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", SHARDED)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_resumes_on_other_ranks(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, optimizer: str, stage: int
) -> None:
    run(small_run, two_ranks, 1, 0, optimizer, name="one")
    for ranks, stop in ((2, 2), (1, 4), (2, STEPS)):
        run(small_run, two_ranks, ranks, stage, optimizer, f"training.stop_after={stop}", name="moved")
    assert_close(tmp_path / "moved", tmp_path / "one", optimizer)


def test_averages_are_exported_and_validations_leave_no_trace(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path
) -> None:
    for name, every in (("often", 1), ("once", 100)):
        more = (
            f"training.validate_every={every}",
            f"training.checkpoint_every={every}",
            "training.validation_tokens=4K",
        )
        run(small_run, two_ranks, 1, 0, "schedule_free", *more, name=name)
    assert curve(tmp_path / "often") == curve(tmp_path / "once")
    # the average of the iterates z, by the definition: y = (1 - beta) z + beta x
    state = torch.load(
        tmp_path / "once/checkpoints/step-00000006/deepspeed/mp_rank_00_model_states.pt", weights_only=False
    )
    trained, exported = state["module"], weights(tmp_path / "once")
    names = [name for group in state["optimizer"]["param_groups"] for name in group["names"]]
    for index, name in enumerate(names):
        z = state["optimizer"]["state"][index]["z"]
        torch.testing.assert_close(0.1 * z + 0.9 * exported[name], trained[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(trained[name], exported[name]) for name in names)
    summary = list(read_metrics(tmp_path / "once/metrics.jsonl"))[-1]
    measured = evaluate(Evaluate(run=str(tmp_path / "once")))
    assert measured["validation/local/loss"] == pytest.approx(summary["validation/local/loss"], rel=1e-5)
