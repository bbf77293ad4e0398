"""With an `end_of_text` the logits of packed documents are those of each document alone."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.evaluation import generate
from depthlm.kernels.moda import merge as depth_merge
from depthlm.model import Decoder, compile_sublayers

from .conftest import BACKBONES, PRESETS

OVER_THE_SEQUENCE = ["vanilla", "moda", "depth_attention"]
END, LENGTH = 7, 16
# where documents end in each row: one of length 1; the first token and the last; several at the start; nowhere
ENDS = [[4, 5, 10], [0, 15], [0, 1, 2, 8], []]


def packed(ends: list[list[int]] = ENDS, length: int = LENGTH, seed: int = 0) -> Tensor:
    tokens = torch.randint(END + 1, 320, (len(ends), length), generator=torch.Generator().manual_seed(seed))
    for row, places in zip(tokens, ends, strict=True):
        row[places] = END
    return tokens


def split(row: Tensor) -> list[Tensor]:
    """The documents of a row, each with the token that ends it."""
    cuts = [place + 1 for place in (row == END).nonzero().flatten().tolist() if place + 1 < len(row)]
    return list(row.tensor_split(cuts))


def alone(model: Decoder, tokens_bt: Tensor) -> Tensor:
    """The logits of each document by itself, in its place."""
    assert model.end_of_text is None
    return torch.cat([torch.cat([model(one[None]) for one in split(row)], dim=1) for row in tokens_bt])


def masked(model: Decoder) -> Decoder:
    other = copy.deepcopy(model)
    other.end_of_text = END
    return other


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("preset", PRESETS)
def test_packed_documents_equal_each_alone(build: Any, preset: str) -> None:
    model = build(f"model={preset}").double()
    assert_same(masked(model)(packed()), alone(model, packed()))
    # what the mask prevents
    assert (model(packed()) - alone(model, packed())).abs().max() > 0.1


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("preset", OVER_THE_SEQUENCE)
def test_packed_documents_equal_each_alone_on_every_backbone_looped(build: Any, preset: str, backbone: str) -> None:
    model = build(f"model={preset}", f"backbone={backbone}", "model.loops=2").double()
    assert_same(masked(model)(packed()), alone(model, packed()))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_of_packed_documents_are_the_sum_of_those_alone(build: Any, preset: str, checkpointing: bool) -> None:
    model = build(f"model={preset}").double()
    other = masked(model)
    other.activation_checkpointing = checkpointing
    along = torch.randn(len(ENDS), LENGTH, 320, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(alone(model, packed()), model.parameters(), along, allow_unused=True)
    assert_same(torch.autograd.grad(other(packed()), other.parameters(), along, allow_unused=True), expected)


def test_moda_without_flash_attention_is_masked_too(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("model=moda").double()
    expected = alone(model, packed())
    monkeypatch.setattr(depth_merge, "has_flash", lambda *_: False)
    assert_same(masked(model)(packed()), expected)


@pytest.mark.parametrize("preset", OVER_THE_SEQUENCE)
def test_compiled_it_stays_masked(build: Any, preset: str) -> None:
    torch.compiler.reset()
    model = build(f"model={preset}").double()
    other = masked(model)
    compile_sublayers(other, backend="aot_eager")
    assert_same(other(packed()), alone(model, packed()))


@pytest.mark.parametrize("preset", PRESETS)
def test_under_autocast_it_stays_masked(build: Any, preset: str) -> None:
    model = build(f"model={preset}")
    with torch.autocast("cpu", torch.bfloat16):
        logits, unmasked, expected = (
            f.float() for f in (masked(model)(packed()), model(packed()), alone(model, packed()))
        )
    assert (logits - expected).norm() < 0.03 * expected.norm()
    assert (unmasked - expected).norm() > 0.2 * expected.norm()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_token_of_another_document_changes_nothing(build: Any, preset: str) -> None:
    model = masked(build(f"model={preset}"))
    tokens = packed([[4, 10], [4, 10]])
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 300 + END + 1
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference.nonzero().flatten().tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("preset", PRESETS)
def test_one_document_equals_the_unmasked_sequence(build: Any, preset: str) -> None:
    model = build(f"model={preset}").double()
    tokens = packed([[], [LENGTH - 1]])
    assert_same(masked(model)(tokens), model(tokens))


@pytest.mark.parametrize("backbone", ["qwen3", "lm1b"])
@pytest.mark.parametrize("preset", PRESETS)
def test_pieces_through_the_cache_equal_the_documents_alone(build: Any, preset: str, backbone: str) -> None:
    model = build(f"model={preset}", f"backbone={backbone}", "model.loops=2").double()
    other = masked(model)
    cache = other.make_cache(4)
    pieces = [other(piece, cache=cache) for piece in packed().split((5, 1, 1, 6, 3), dim=1)]
    assert_same(torch.cat(pieces, dim=1), alone(model, packed()))


@settings(max_examples=30, deadline=None)
@given(
    ends=st.lists(st.lists(st.integers(0, 11), unique=True, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 11), unique=True, max_size=5).map(sorted),
    preset=st.sampled_from(OVER_THE_SEQUENCE),
)
def test_any_documents_in_any_pieces(build: Any, ends: list[list[int]], cuts: list[int], preset: str) -> None:
    model = build(f"model={preset}", "size.num_layers=2").double()
    other, tokens = masked(model), packed(ends, 12)
    cache = other.make_cache()
    with torch.no_grad():
        pieces = [other(piece, cache=cache) for piece in tokens.tensor_split(cuts, dim=1)]
        assert_same(torch.cat(pieces, dim=1), alone(model, tokens))
        assert_same(other(tokens), alone(model, tokens))


@pytest.mark.parametrize("preset", OVER_THE_SEQUENCE)
def test_generation_continues_the_last_document(build: Any, preset: str) -> None:
    model = build(f"model={preset}")
    prompt = packed([[3]], 9)
    written = generate(masked(model), prompt, 6)
    assert torch.equal(written, generate(masked(model), prompt, 6, use_cache=False))
    assert torch.equal(written[:, 4:], generate(model, prompt[:, 4:], 6))


@pytest.mark.parametrize("preset", PRESETS)
def test_padding_on_the_left_is_a_document_of_its_own(build: Any, preset: str) -> None:
    model = build(f"model={preset}").double()
    tokens, padding = packed([[], [], []], 9), [0, 2, 5]
    padded = torch.stack([row.roll(pad) for row, pad in zip(tokens, padding, strict=True)])
    ends = torch.arange(9) < torch.tensor(padding)[:, None]
    cache = model.make_cache(2)
    # the cache remembers where each prompt begins
    logits = torch.cat([model(padded[:, :7], cache=cache, ends_bt=ends[:, :7]), model(padded[:, 7:], cache=cache)], 1)
    for row, text, pad in zip(logits, tokens, padding, strict=True):
        assert_same(row[pad:], model(text[None, : 9 - pad])[0])
