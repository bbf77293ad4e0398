"""The interventions of the study on trained models."""

import pytest

from benchmarks.study.interventions import of_model
from depthlm.inspect.interventions import Batch

from ..inspect.conftest import TOKENS, build

__all__ = ["build"]
CHOSEN: list[Batch] = [(TOKENS[:2, :-1], TOKENS[:2, 1:])]
MEASURED: list[Batch] = [(TOKENS[2:, :-1], TOKENS[2:, 1:]), (TOKENS[:1, :5], TOKENS[:1, 1:6])]


def test_static_weights_equal_their_means(build):
    result = of_model(build("model=denseformer"), CHOSEN, MEASURED)
    assert result["means"] == pytest.approx(result["loss"], rel=1e-6)
    assert result["kept 2"] != pytest.approx(result["loss"], rel=1e-4)
    # of four layers, no read has more than five sources
    assert "kept 8" not in result


def test_what_a_mechanism_lacks_is_left_out(build):
    assert of_model(build("model=vanilla"), CHOSEN, MEASURED).keys() == {"loss"}
    assert of_model(build("model=mhc"), CHOSEN, MEASURED).keys() == {"loss", "edges", "rank", "means"}
    assert of_model(build("model=unet_skip"), CHOSEN, MEASURED).keys() == {"loss", "edges", "rank", "means"}
