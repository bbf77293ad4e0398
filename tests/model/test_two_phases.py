"""Two-phase reads compute the same as connections that read separately."""

from typing import Any

import pytest
import torch

from .gradients import assert_same

# with eleven layers, a phase ends before the last read
LAYERS = "size.num_layers=11"
MECHANISMS = (
    "model=attention_residuals model.connection.block_size=3",
    "model=attention_residuals_full",
    "model=attention_residuals_inkling2 model.connection.block_size=3 model.connection.separate_qkv=3",
    "model=attention_residuals model.connection.separate_qkv=2 model.loops=2",
    "model=attention_residuals_recency",
    "model=denseformer model.connection.period=2",
    "model=denseformer model.connection.dilation=2",
    "model=grn_v1",
    "model=grn_v3 model.connection.w=shared",
    "model=dca model.connection.last_k=2",
    "model=dca model.loops=2",
)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_two_phase_reads_equal_separate_reads_also_in_their_types_under_autocast(build, mechanism):
    model, alone = (build(*mechanism.split(), LAYERS) for _ in range(2))
    alone.read_alone()
    assert types_of_reads(model) == types_of_reads(alone)
    assert_same(alone.double(), model.double(), tolerance=1e-9)


def types_of_reads(model: Any) -> list[list[torch.dtype]]:
    """Return the types of the inputs of every sublayer under autocast, which must not be those of the newest source."""
    types: list[list[torch.dtype]] = []
    for connection in model.connections:

        def noting(stream: Any, read: Any = connection.read) -> Any:
            inputs, carry = read(stream)
            types.append([x.dtype for x in inputs])
            return inputs, carry

        connection.read = noting
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1, 3, dtype=torch.long))
    for connection in model.connections:
        del connection.read
    return types
