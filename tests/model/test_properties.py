"""Properties of every decoder, in cases where each two of connection, attention, backbone, mixers, loops, document mask
and recomputation meet: tokens depend only on earlier ones of their document, a cache, chunks of a prefill and padding
change nothing, packed documents equal single ones, also their gradients, and recomputation changes nothing."""

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import depthlm
from depthlm.locations import CONF
from depthlm.model import Decoder, compile_sublayers
from depthlm.model.generation import generate, prefill
from depthlm.model.parameters import initialize

from ..options import mechanism, option, parts_of
from ..pairs import Row, covering
from .conftest import BACKBONES, PRESETS, awaken, configuration

END, LENGTH = 7, 17
# where documents end in each row
ENDS = ([4, 5, 10], [0, 15])
MIXERS = {
    "own": {},
    "latent": {"mixers": ["latent"], "position": "none", "qk_norm": "none"},
    "delta": {"mixers": ["delta", "attention"]},
}
ATTENTIONS = ["vanilla", *(name for name in PRESETS if parts_of(name)["attention"] != "self_attention")]
IN_PRESETS = [name for name in PRESETS if name not in ATTENTIONS[1:]]
FURTHER = sorted({path.stem for path in (CONF / "model/connection").glob("*.yaml")} - {*PRESETS, "residual"})
CONNECTIONS = IN_PRESETS + FURTHER


def allowed(row: Row) -> bool:
    # the backbone that has mixers of its own
    return row.get("backbone") != "kimi_linear" or row.get("mixers", "own") == "own"


AXES: dict[str, Any] = {
    "connection": CONNECTIONS, "backbone": BACKBONES, "attention": ATTENTIONS, "mixers": list(MIXERS),
    "mask": [False, True, "bos"], "recompute": [True, 3, "selective"], "loops": [1, 2],
}  # fmt: skip
CASES = covering(allowed, **AXES)


def build_decoder(connection: str, backbone: str, attention: str, mixers: str, loops: int) -> Decoder:
    config = configuration(f"model.loops={loops}", f"size.num_layers={4 // loops}", "size.num_experts=4")
    changes = MIXERS[mixers] | ({"mixers": ["delta", "latent"]} if backbone == "kimi_linear" else {})
    further = connection in FURTHER
    parts = {
        "connection": option("model/connection", connection) if further else mechanism(connection)["connection"],
        "attention": mechanism(attention)["attention"],
    }
    config = replace(
        config,
        backbone=replace(config.backbone, **option("backbone", backbone) | changes),
        model=replace(config.model, **parts),
    )
    model = depthlm.build_model(config)
    initialize(model, seed=0, std=0.1)
    return awaken(model).double()


def decoder_of(row: Row) -> Decoder:
    model = build_decoder(*(row[axis] for axis in ("connection", "backbone", "attention", "mixers", "loops")))
    model.mask_documents(row["mask"], END)
    return model


def tokens() -> Tensor:
    tokens_bt = torch.randint(END + 1, 320, (len(ENDS), LENGTH), generator=torch.Generator().manual_seed(0))
    for row, ends in zip(tokens_bt, ENDS, strict=True):
        row[ends] = END
    return tokens_bt


def documents(row: Tensor, mask: bool | str) -> list[range]:
    """Return the places of a row's documents, each with its final end-of-text token, or its first one with "bos"."""
    cuts = [place + (mask is True) for place in (row == END).nonzero().flatten().tolist()] if mask else []
    bounds = [0, *(cut for cut in cuts if 0 < cut < len(row)), len(row)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def alone(model: Decoder, tokens_bt: Tensor, mask: bool | str) -> Tensor:
    """Return the logits of each document alone, at its place in the row. Documents of one length are one batch."""
    places = [(row, document) for row, text in enumerate(tokens_bt) for document in documents(text, mask)]
    found = {}
    for length in {len(document) for _, document in places}:
        equal = [(row, document) for row, document in places if len(document) == length]
        batch_bt = torch.stack([tokens_bt[row, document.start : document.stop] for row, document in equal])
        found |= dict(zip(equal, unmasked(model, batch_bt), strict=True))
    return torch.stack([torch.cat([found[i, one] for one in documents(row, mask)]) for i, row in enumerate(tokens_bt)])


def unmasked(model: Decoder, tokens_bt: Tensor) -> Tensor:
    end_of_text, model.end_of_text = model.end_of_text, None
    logits_btv = model(tokens_bt)
    model.end_of_text = end_of_text
    return logits_btv


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def check_what_a_token_affects(model: Decoder, logits_btv: Tensor, mask: bool | str) -> None:
    changed_bt = tokens()
    changed_bt[:, 9] = (changed_bt[:, 9] + 1) % 300 + END + 1
    for row, difference_tv in zip(tokens(), (logits_btv - model(changed_bt)).abs(), strict=True):
        (document,) = (document for document in documents(row, mask) if 9 in document)
        # with experts, the order of their sums depends on all tokens
        affected = (difference_tv.amax(dim=1) > 1e-12).nonzero().flatten().tolist()
        assert affected == list(range(9, document.stop))


def check_cache(model: Decoder, logits_btv: Tensor) -> None:
    pieces, chunks = model.make_cache(4), model.make_cache()
    found = [model(piece_bt, cache=pieces) for piece_bt in tokens().split((5, 1, 7, 4), dim=1)]
    assert_same(torch.cat(found, dim=1), logits_btv)
    assert_same(prefill(model, tokens(), chunks, 6), logits_btv[:, -1])
    assert_same(stored(chunks), stored(pieces))


def stored(cache: Any) -> list[Tensor]:
    """Return all tensors of a cache."""
    pairs = [x[:, :, : cache.length] for pair in cache._slots if pair is not None for x in pair]
    return [*pairs, *(x for _, state in sorted(cache._states.items()) for x in state)]


def check_generation_with_padding(model: Decoder) -> None:
    # the first chunk of the second row is padding only
    padding = (0, 5)
    padded_bt = torch.stack([row.roll(pad) for row, pad in zip(tokens(), padding, strict=True)])
    found = generate(model, padded_bt, 2, padding_b=torch.tensor(padding), prefill_chunk=5)
    for row, written, pad in zip(tokens(), found, padding, strict=True):
        expected = generate(model, row[None, : LENGTH - pad], 2, use_cache=False)[0]
        assert written[pad:].tolist() == expected.tolist()


def check_recomputation(model: Decoder, recompute: bool | int | str) -> None:
    other = copy.deepcopy(model)
    other.activation_checkpointing = recompute
    for one, two in zip(results(model), results(other), strict=True):
        assert torch.equal(one, two)


def results(model: Decoder) -> list[Tensor]:
    """Return the loss with the penalty of experts, and all gradients."""
    loss = model(tokens()[:, :-1], tokens()[:, 1:]).total(0.1)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss, *(gradient for gradient in gradients if gradient is not None)]


def check_documents(model: Decoder, mask: bool | str) -> None:
    along_btv = torch.randn(len(ENDS), LENGTH, 320, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    both = [logits_btv, alone_btv] = model(tokens()), alone(model, tokens(), mask)
    assert_same(logits_btv, alone_btv)
    assert_same(*(torch.autograd.grad(one, list(model.parameters()), along_btv, allow_unused=True) for one in both))


def speed(row: Row) -> Any:
    """One backbone of each connection is quick."""
    quick = BACKBONES[CONNECTIONS.index(row["connection"]) % len(BACKBONES)]
    return () if row["backbone"] == quick else pytest.mark.slow


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=speed(row)) for row in CASES],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_a_decoder_has_every_property(row):
    model, mask = decoder_of(row), row["mask"]
    with torch.no_grad():
        logits_btv = model(tokens())
        check_what_a_token_affects(model, logits_btv, mask)
        check_cache(model, logits_btv)
        check_generation_with_padding(model)
    check_recomputation(model, row["recompute"])
    if mask:
        check_documents(model, mask)


@pytest.mark.parametrize("loops", [1, 2])
def test_selective_recomputation_in_bf16_gives_the_gradients_of_none(loops):
    model = build_decoder("vanilla", "qwen3", "vanilla", "own", loops).float()
    other = copy.deepcopy(model)
    other.activation_checkpointing = "selective"
    with torch.autocast("cpu", torch.bfloat16):
        both = results(other), results(model)
    # without recomputation, the gradients of several loops are added in bf16
    tolerance = {"rtol": 0.02, "atol": 0.02} if loops > 1 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(*both, **tolerance)


COMPILED = {
    "attentions": ["fp64", "gated_residual", "lm1b", "value_residual", True, False, 1],
    "own": ["fp64", "mhc", "qwen3_moe", "depth_attention", False, False, 2],
    "documents": ["bf16", "dca", "olmo2", "moda", "bos", True, 1],
    "sources": ["fp64", "attention_residuals", "moda_layers", "shared_kv", False, True, 1],
    "averages": ["bf16", "denseformer", "kimi_linear", "moda", False, "selective", 2],
    "streams": ["fp64", "hyper_connections", "qwen3", "depth_attention", True, False, 1],
    "each input": ["bf16", "mudd", "olmo2", "vanilla", False, False, 1],
    "gates": ["fp64", "qwen4_exp", "kimi_linear", "vanilla", True, False, 1],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "attentions" else pytest.mark.slow) for name in COMPILED]
)
def test_compile_changes_nothing(name):
    precision, connection, backbone, attention, mask, recompute, loops = COMPILED[name]
    torch.compiler.reset()
    model = build_decoder(connection, backbone, attention, "own", loops)
    model.mask_documents(mask, END)
    other = copy.deepcopy(model)
    other.activation_checkpointing = recompute
    compile_sublayers(other, backend="aot_eager")
    if precision == "fp64":
        assert_same(results(other), results(model))
        return
    with torch.autocast("cpu", torch.bfloat16):
        losses = [one.float()(tokens(), tokens()).nll for one in (other, model)]
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)
