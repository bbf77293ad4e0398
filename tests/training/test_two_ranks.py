"""Two ranks compute at every stage what one rank computes, and resume bit for bit."""

from pathlib import Path

import pytest
import torch

from .run_files import assert_same_run, curve, losses, states, weights

STEPS = 6


def assert_close(one: Path, other: Path, precision: str) -> None:
    """Assert that losses, gradient norms and final weights of two runs are equal within rounding."""
    tolerance = {"fp32": 1e-5, "bf16": 3e-3}[precision]
    assert len(losses(one)) == STEPS
    torch.testing.assert_close(losses(one), losses(other), rtol=tolerance, atol=0)
    norms = ([row[4] for row in curve(path)] for path in (one, other))
    torch.testing.assert_close(*norms, rtol=10 * tolerance, atol=0)
    first, expected = weights(one), weights(other)
    for name in expected:
        assert torch.dist(first[name].float(), expected[name].float()) <= 10 * tolerance * expected[name].float().norm()


# the stage of the single rank; at ZeRO 0, bf16 is autocast, whose numbers are others
@pytest.mark.parametrize(
    ("stage", "precision", "stage_of_one"),
    [
        ("zero1", "bf16", "zero1"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("zero0", "fp32", "zero0"), ("zero0", "bf16", "zero0"), ("zero2", "fp32", "zero0"),
                         ("zero3", "bf16", "zero1"), ("zero3_offload", "fp32", "zero0"))
        ),
    ],
)  # fmt: skip
def test_two_ranks_equal_one_that_accumulates_two_batches_and_resume_bit_for_bit(
    train_run, stage, precision, stage_of_one
):
    given = (f"training.max_steps={STEPS}", "training.micro_batch_size=2", "training.checkpoint_every=100",
             f"precision={precision}")  # fmt: skip
    one = train_run(*given, f"deepspeed={stage_of_one}", name="one")
    two = train_run(*given, f"deepspeed={stage}", ranks=2, name="two")
    resumed = train_run(*given, f"deepspeed={stage}", ranks=2, name="resumed", stops=(3, STEPS))
    for run, words in ((one, "1 rank x 2 acc"), (two, "2 ranks x 1 accumulated x 2 seq"), (resumed, "resumed from")):
        assert words in (run / "train.log").read_text()
    assert_close(two, one, precision)
    assert_same_run(two, resumed)
    # sharded states are compared on both ranks
    large = [name for name, value in states(two).items() if isinstance(value, torch.Tensor) and value.numel() > 9]
    assert len({name.split("/")[1] for name in large}) == {"zero0": 1, "zero1": 3, "zero2": 3}.get(stage, 2)
