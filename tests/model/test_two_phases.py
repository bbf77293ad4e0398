"""A decoder whose reads are made together computes what one does whose connections read alone."""

from typing import Any

import pytest
import torch

from .test_presets import assert_same

# eleven layers, so that a phase ends before the last read
LAYERS = "size.num_layers=11"
MECHANISMS = (
    "model=attention_residuals",
    "model=attention_residuals model.connection.block_size=3",
    "model=attention_residuals_full",
    "model=attention_residuals_full model.connection.key_norm=false",
    "model=attention_residuals_recency",
    "model=denseformer",
    "model=denseformer model.connection.period=2",
    "model=denseformer model.connection.dilation=2",
    "model=grn_v1",
    "model=grn_v3",
    "model=grn_v3 model.connection.w=shared",
    "model=dca",
    "model=dca model.connection.last_k=2",
    "model=dca model.loops=2",
)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_reads_made_together_are_those_made_alone(build: Any, mechanism: str) -> None:
    model, alone = (build(*mechanism.split(), LAYERS).double() for _ in range(2))
    alone.read_alone()
    assert_same(alone, model, tolerance=1e-9)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_under_autocast_no_read_is_rounded_to_its_newest_source(build: Any, mechanism: str) -> None:
    model, types = build(*mechanism.split(), LAYERS), []
    for connection in model.connections:
        read = connection.read

        def noting(stream: Any, read: Any = read) -> Any:
            inputs, carry = read(stream)
            types.append([x.dtype for x in inputs])
            return inputs, carry

        connection.read = noting
    both = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 3, dtype=torch.long))
        both.append(types[:])
        types.clear()
        model.read_alone()
    assert both[0] == both[1]


@pytest.mark.parametrize("preset", ["attention_residuals", "mhc"])
def test_a_graph_with_recomputation_may_be_used_twice(build: Any, preset: str) -> None:
    model = build(f"model={preset}")
    model.activation_checkpointing = True
    tokens = torch.ones(1, 4, dtype=torch.long)
    loss = model(tokens, tokens).nll
    first, second = (torch.autograd.grad(loss, [model.embedding.weight], retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("preset", ["attention_residuals", "denseformer", "dca"])
def test_phases_are_recomputed_with_their_layers(build: Any, preset: str) -> None:
    model, recomputed = (build(f"model={preset}", LAYERS).double() for _ in range(2))
    recomputed.activation_checkpointing = True
    assert_same(model, recomputed, tolerance=1e-9)


@pytest.mark.parametrize("preset", ["attention_residuals", "attention_residuals_recency", "denseformer", "dca"])
def test_a_stream_without_what_waits_is_that_of_reads_alone(build: Any, preset: str) -> None:
    together, alone = build(f"model={preset}", LAYERS), build(f"model={preset}", LAYERS)
    alone.read_alone()
    streams = []
    for model in (together, alone):
        stream, seen = model.connections[0].open(torch.ones(1, 2, 32)), []
        for i, connection in enumerate(model.connections[:-1]):
            seen.append([x.detach() for x in connection.materialize(stream)])
            _, carry = connection.read(stream)
            stream = connection.write(stream, torch.full((1, 2, 32), float(i)), carry)
        streams.append(seen)
    torch.testing.assert_close(*streams)
