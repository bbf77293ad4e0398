"""Two ranks compute what one rank computes at every stage, and resume bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.training import train

from ..two_ranks import TwoRanks, train_on_ranks
from .run_files import assert_same, curve, states, weights

STEPS = 6
QUICK = [("zero1", "bf16")]
STAGES, PRECISIONS = ("zero0", "zero1", "zero2", "zero3"), ("fp32", "bf16")
REST = [(stage, precision) for stage in STAGES for precision in PRECISIONS if (stage, precision) not in QUICK]
PAIRS = [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this module's runs, which several tests share."""
    return tmp_path_factory.mktemp("curves")


@pytest.fixture
def trained(two_ranks: TwoRanks, small_run: Callable[..., list[str]], folder: Path) -> Callable[..., Path]:
    """Return the directory of a run with micro-batches of two, trained on first use. name: distinguishes runs."""

    def find(stage: str, precision: str, *overrides: str, world_size: int = 2, name: str = "straight") -> Path:
        path = folder / f"{stage}-{precision}-{world_size}-{name}"
        settings = (f"training.max_steps={STEPS}", "training.micro_batch_size=2", "training.checkpoint_every=100",
                    f"deepspeed={stage}", f"precision={precision}", f"output_dir={path}", *overrides)  # fmt: skip
        if not (path / "summary.json").exists():
            if world_size == 2:
                assert two_ranks(train_on_ranks, small_run(*settings)) == [0, 0]
            else:
                assert train(depthlm.compose(small_run(*settings))) == 0
        return path

    return find


def losses(directory: Path) -> list[float]:
    return [row[2] for row in curve(directory)]


def norms(directory: Path) -> list[float]:
    return [row[4] for row in curve(directory)]


def assert_close(one: Path, other: Path, precision: str) -> None:
    """Assert that losses, gradient norms and final weights of two runs are equal within rounding."""
    tolerance = {"fp32": 1e-5, "bf16": 3e-3}[precision]
    assert len(losses(one)) == STEPS
    torch.testing.assert_close(losses(one), losses(other), rtol=tolerance, atol=0)
    torch.testing.assert_close(norms(one), norms(other), rtol=10 * tolerance, atol=0)
    first, expected = weights(one), weights(other)
    for name in expected:
        assert torch.dist(first[name].float(), expected[name].float()) <= 10 * tolerance * expected[name].float().norm()


@pytest.mark.parametrize(("stage", "precision"), PAIRS)
def test_straight_equals_resumed_bit_for_bit(trained: Callable[..., Path], stage: str, precision: str) -> None:
    straight = trained(stage, precision)
    trained(stage, precision, "training.stop_after=3", name="resumed")
    resumed = trained(stage, precision, name="resumed")
    assert "resumed from" in (resumed / "train.log").read_text()
    assert curve(straight) == curve(resumed)
    assert len(curve(straight)) == STEPS
    assert_same(weights(straight), weights(resumed))
    state = states(straight)
    assert_same(state, states(resumed))
    # sharded states are compared on both ranks
    large = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 9]
    assert len({name.split("/")[1] for name in large}) == {"zero0": 1, "zero1": 3, "zero2": 3, "zero3": 2}[stage]


@pytest.mark.parametrize(("stage", "precision"), PAIRS)
def test_two_ranks_equal_one_that_accumulates_two_batches(
    trained: Callable[..., Path], stage: str, precision: str
) -> None:
    one = trained(stage, precision, world_size=1)
    assert "1 rank x 2 accumulated x 2 sequences" in (one / "train.log").read_text()
    two = trained(stage, precision)
    assert "2 ranks x 1 accumulated x 2 sequences" in (two / "train.log").read_text()
    assert_close(two, one, precision)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3", "zero3_offload"])
def test_every_stage_on_two_ranks_gives_the_curve_of_stage_0(trained: Callable[..., Path], stage: str) -> None:
    assert_close(trained(stage, "fp32"), trained("zero0", "fp32"), "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3", "zero3_offload"])
def test_every_stage_on_two_ranks_gives_the_same_curve_in_bf16(trained: Callable[..., Path], stage: str) -> None:
    assert_close(trained(stage, "bf16"), trained("zero1", "bf16"), "bf16")
