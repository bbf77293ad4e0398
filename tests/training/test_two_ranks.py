"""Two ranks compute at every stage what one rank computes, and resume bit for bit."""

import pytest
import torch

from .run_files import assert_close, states, train_three

KIMI = "backbone=kimi_linear size.num_layers=3 size.num_experts=4 data.document_mask=true"
# validations put the averages of the weights in their place
LIBRARY = "schedule=constant training.validate_every=2 optimizer="


# the stage of the single rank; at ZeRO 0, bf16 is autocast, whose numbers are others
@pytest.mark.parametrize(
    ("stage", "kind", "stage_of_one", "tolerance"),
    [
        ("zero1", "precision=bf16", "zero1", 3e-3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("zero0", "precision=fp32", "zero0", 1e-5), ("zero0", "precision=bf16", "zero0", 3e-3),
                ("zero2", "precision=fp32", "zero0", 1e-5), ("zero3", "precision=bf16", "zero1", 3e-3),
                ("zero3_offload", "precision=fp32", "zero0", 1e-5),
                ("zero0", f"{KIMI} model=attention_residuals", "zero0", 1e-5),
                ("zero3", f"{KIMI} model=moda", "zero0", 1e-5),
                ("zero1", f"{LIBRARY}ademamix", "zero0", 1e-5), ("zero3", f"{LIBRARY}schedule_free", "zero0", 1e-5),
                # the eigenvectors of SOAP's first preconditioners, which have a low rank, depend on rounding
                ("zero0", f"{LIBRARY}soap", "zero0", 1e-2),
            )
        ),
    ],
)  # fmt: skip
def test_two_ranks_equal_one_that_accumulates_two_batches_and_resume_bit_for_bit(
    train_run, stage, kind, stage_of_one, tolerance
):
    if LIBRARY in kind:
        pytest.importorskip("pytorch_optimizer")
    given = ("training.micro_batch_size=2", *kind.split(), f"deepspeed={stage}")
    one, two, resumed = train_three(train_run, *given, of_one=(f"deepspeed={stage_of_one}",))
    for run, words in ((one, "1 rank x 2 acc"), (two, "2 ranks x 1 accumulated x 2 seq"), (resumed, "resumed from")):
        assert words in (run / "train.log").read_text()
    assert_close(two, one, tolerance, (100 if LIBRARY in kind else 10) * tolerance)
    # sharded states are compared on both ranks
    large = [name for name, value in states(two).items() if isinstance(value, torch.Tensor) and value.numel() > 9]
    assert len({name.split("/")[1] for name in large}) == {"zero0": 1, "zero1": 3, "zero2": 3}.get(stage, 2)
