"""A decoder with parallel streams has the same loss and gradients with Triton kernels as with PyTorch."""

import copy
from typing import Any

import pytest
import torch

from depthlm.model import compile_sublayers

from .gradients import loss_and_gradients

pytest.importorskip("triton")
PRESETS = ("hyper_connections", "mhc")


@pytest.mark.parametrize(
    ("preset", "streams", "checkpointing"),
    [
        *((preset, 2, True) for preset in PRESETS),
        *((preset, 3, False) for preset in ("mhc_deepseek_v4", "mhc_hunyuan_v4")),
        *(
            pytest.param(preset, *case, marks=pytest.mark.slow)
            for preset in PRESETS
            for case in ((2, False), (4, True))
        ),
    ],
)
def test_triton_equals_pytorch(build: Any, preset: str, streams: int, checkpointing: bool) -> None:
    model = build(f"model={preset}", f"model.connection.num_streams={streams}", "size.num_layers=2")
    model.activation_checkpointing = checkpointing
    compare(model, copy.deepcopy(model))


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_sublayers_with_triton_equal_pytorch(build: Any, preset: str) -> None:
    torch.compiler.reset()
    model = build(f"model={preset}", "size.num_layers=2")
    other = copy.deepcopy(model)
    compile_sublayers(other, backend="aot_eager")
    compare(model, other)


def compare(model: Any, other: Any) -> None:
    model.kernels, other.kernels = "torch", "triton"
    (expected, expected_grads), (loss, grads) = (loss_and_gradients(m, length=5) for m in (model, other))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).abs().max() <= 1e-4 * expected_grads[name].abs().max() + 1e-7, name
