"""Runs on Kimi Linear: two ranks and one, resumed and converted runs, packed documents, and what cannot be built."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.config import ConfigError
from depthlm.training import train

from ..two_ranks import TwoRanks, train_and_resume, train_on_ranks
from .run_files import assert_same, curve, weights

STEPS = 6
KIMI = ("backbone=kimi_linear", "size.num_layers=3", "size.num_experts=4", "data.document_mask=true",
        "training.log_every=1", f"training.max_steps={STEPS}", "training.checkpoint_every=100")  # fmt: skip
Overrides = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("stage", "model"),
    [
        ("zero0", "attention_residuals"),
        pytest.param("zero1", "moda", marks=pytest.mark.slow),
        pytest.param("zero2", "mhc", marks=pytest.mark.slow),
        pytest.param("zero3", "depth_attention", marks=pytest.mark.slow),
        pytest.param("zero3", "dca", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one_and_a_resumed_run_equals_both(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, stage: str, model: str
) -> None:
    given = (*KIMI, f"deepspeed={stage}", f"model={model}")
    assert train(depthlm.compose(small_run(*given, name="one"))) == 0
    train_and_resume(two_ranks, small_run, given, (3, STEPS))
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    assert curve(two) == curve(resumed)
    assert_same(weights(two), weights(resumed))
    torch.testing.assert_close([row[2] for row in curve(one)], [row[2] for row in curve(two)], rtol=1e-5, atol=0)


@pytest.mark.slow
def test_another_number_of_ranks_resumes(two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path) -> None:
    given = (*KIMI, "deepspeed=zero1")
    assert two_ranks(train_on_ranks, small_run(*given, name="straight")) == [0, 0]
    assert two_ranks(train_on_ranks, small_run(*given, "training.stop_after=3", name="converted")) == [0, 0]
    assert train(depthlm.compose(small_run(*given, name="converted"))) == 0
    expected, converted = ([row[2] for row in curve(tmp_path / name)] for name in ("straight", "converted"))
    torch.testing.assert_close(converted, expected, rtol=1e-5, atol=0)


def test_a_run_tells_its_mixers(small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        train(depthlm.compose(small_run("model=moda", "size.num_layers=3", "backbone.mixers=[delta,attention]"))) == 0
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "mixers 1 delta, 2 attention layers; the attention of moda is in the 2 with keys and values" in shown


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backbone.mixers=[softmax]"], "must be a list of one or more of attention, latent, delta"),
        (["backbone.mixers=[]"], "must be a list of one or more of attention, latent, delta"),
        (["backbone.mixers=[latent]"], "backbone.position=rope: the keys of mixer latent are not rotated"),
        (
            ["backbone.mixers=[delta]", "model=moda"],
            "the attention of model=moda may read keys and values of other layers",
        ),
        (
            ["backbone.mixers=[attention,latent]", "backbone.position=none", "model=depth_attention"],
            "those of attention and latent differ in width",
        ),
    ],
)
def test_impossible_mixers_are_refused(small_run: Overrides, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        depthlm.compose(small_run(*overrides))
