"""Mixers that cannot be built; runs with others are in test_two_ranks.py."""

import pytest

import depthlm
from depthlm.config import ConfigError


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
