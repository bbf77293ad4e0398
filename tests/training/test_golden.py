"""The first losses of every preset equal stored values; other tests compare with independent references."""

import json
from pathlib import Path

import pytest
import torch

from depthlm.config import mechanisms

from .synthetic import losses

GOLDEN = Path(__file__).parent / "golden"
QUICK = ("attention_residuals",)


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in mechanisms()]
)
def test_the_golden_curve_which_begins_alike_at_zero_3(preset, small_run, request):
    overrides = small_run(f"model={preset}", "size.num_layers=4")
    found = losses(overrides, 10)
    assert found[-1] < found[0] - 0.5
    path = GOLDEN / f"{preset}.json"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([round(loss, 6) for loss in found]) + "\n")
    torch.testing.assert_close(found, json.loads(path.read_text()), rtol=1e-4, atol=0)
    torch.testing.assert_close(losses([*overrides, "deepspeed=zero3"], 4), found[:4], rtol=1e-5, atol=0)
