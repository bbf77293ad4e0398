"""A decoder in chunks of layers that pass on only what later layers need computes what the whole decoder computes."""

import copy

import pytest
import torch
from torch import Tensor

from depthlm.locations import CONF
from depthlm.model import Decoder
from depthlm.summary.overhead import transitions
from depthlm.training.pipeline.chunks import (
    chunks_of,
    describe_cut,
    link,
    plan_route,
    resume,
    slots_of,
    tensors_at,
)

from ...model.conftest import PRESETS, decoder
from ...model.gradients import random_batch

CONNECTIONS = sorted(path.stem for path in (CONF / "model/connection").glob("*.yaml"))
SETTINGS = [
    "model=moda model.attention.slots=3 model.attention.attn_kv=true",
    "model=depth_attention model.attention.sources=relative model.attention.stride=2",
    "model=attention_residuals model.connection.values=normed model.connection.block_size=3",
    "model=dca model.connection.last_k=2",
    "model=mhc model/attention=moda model.loops=2",
    "model=attention_residuals_full model.loops=2 backbone=lm1b",
    "model=value_residual backbone=kimi_linear size.num_layers=5",
    "model=moda backbone=kimi_linear size.num_layers=5",
]
CASES = [*(f"model={name}" for name in PRESETS), *(f"model/connection={name}" for name in CONNECTIONS), *SETTINGS]


def loss_in_chunks(model: Decoder, tokens: Tensor, targets: Tensor, count: int) -> Tensor:
    """Return the loss of a forward pass that passes only the tensors of the cuts from chunk to chunk."""
    chunks = chunks_of(model, count)
    prefix, _ = model.run(tokens, until=0)
    cuts, known = [], {}
    for chunk in chunks:
        link(model, chunk)
        cuts.append(describe_cut(model, prefix, {id(x): key for key, x in known.items()}, chunk.number - 1))
        known = tensors_at(model, cuts[-1], prefix)
        prefix, _ = model.run(tokens, resume(model, cuts[-1], chunk.start, known), chunk.end)
    for stages, virtual in ((2, count // 2), (count, 1)):
        route = [
            [sum(slot.shape.numel() for slot in sent) for sent in plan_route(cuts, stages, caching).sent[1:]]
            for caching in (False, True)
        ]
        # bytes of 16 bits per token
        assert [[2 * values / tokens.numel() for values in each] for each in route] == [
            *transitions(model, stages, virtual)
        ]
    assert all(slots_of(cut) for cut in cuts)
    return model.loss(model.close(prefix), targets).nll


@pytest.mark.parametrize("case", CASES)
def test_chunks_compute_what_the_whole_decoder_computes(case):
    whole, model = (copy.deepcopy(decoder(*case.split(), awake=True)).double() for _ in range(2))
    tokens, targets = random_batch()
    expected, loss = whole(tokens, targets).nll, loss_in_chunks(model, tokens, targets, 4)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    expected.backward()
    loss.backward()
    for (name, one), other in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12, msg=name)
