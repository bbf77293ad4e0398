"""Runs on Kimi Linear: two ranks and one, resumed runs, packed documents, and what cannot be built."""

import pytest
import torch

import depthlm
from depthlm.config import ConfigError

from .run_files import losses, train_three

STEPS = 6
KIMI = ("backbone=kimi_linear", "size.num_layers=3", "size.num_experts=4", "data.document_mask=true",
        "training.log_every=1", f"training.max_steps={STEPS}", "training.checkpoint_every=100")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "model"), [("zero0", "attention_residuals"), ("zero3", "moda")])
def test_two_ranks_equal_one_and_a_resumed_run_equals_both(train_run, stage, model):
    one, two, _ = train_three(train_run, *KIMI, f"deepspeed={stage}", f"model={model}", stops=(3, STEPS))
    torch.testing.assert_close(losses(one), losses(two), rtol=1e-5, atol=0)


def test_impossible_mixers_are_refused(small_run):
    for overrides, message in (
        (["backbone.mixers=[softmax]"], "must be a list of one or more of attention, latent, delta"),

        (["backbone.mixers=[latent]"], "backbone.position=rope: the keys of mixer latent are not rotated"),
        (["backbone.mixers=[delta]", "model=moda"], "attention of model=moda may read keys and values of other layers"),
        (["backbone.mixers=[attention,latent]", "backbone.position=none", "model=depth_attention"],
         "those of attention and latent differ in width"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            depthlm.compose(small_run(*overrides))
