"""An mhc decoder has the same loss and gradients with Triton kernels as with PyTorch."""

import copy
from typing import Any

import pytest
import torch

from depthlm.model.decoder import compile_sublayers

from .gradients import loss_and_gradients

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("streams", "checkpointing"),
    [(2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (4, True)))],
)
def test_mhc_with_triton_equals_mhc_with_pytorch(build: Any, streams: int, checkpointing: bool) -> None:
    model = build("model=mhc", f"model.connection.num_streams={streams}", "size.num_layers=2")
    model.activation_checkpointing = checkpointing
    compare(model, copy.deepcopy(model))


@pytest.mark.slow
def test_compiled_mhc_with_triton_equals_pytorch(build: Any) -> None:
    torch.compiler.reset()
    model = build("model=mhc", "size.num_layers=2")
    other = copy.deepcopy(model)
    compile_sublayers(other, backend="aot_eager")
    compare(model, other)


def compare(model: Any, other: Any) -> None:
    model.kernels, other.kernels = "torch", "triton"
    (expected, expected_grads), (loss, grads) = (loss_and_gradients(m, length=5) for m in (model, other))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).abs().max() <= 1e-4 * expected_grads[name].abs().max() + 1e-7, name
