"""With `end_of_text`, the logits of packed documents equal those of each document alone."""

import copy
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.evaluation import generate
from depthlm.model import Decoder, compile_sublayers
from depthlm.ops.moda import merge as depth_merge

from .conftest import BACKBONES, PRESETS, quick_first

OVER_THE_SEQUENCE = ["vanilla", "moda", "depth_attention"]
# the other mechanisms do not mix positions; dca has other queries, keys and values
QUICK = [*OVER_THE_SEQUENCE, "dca"]
OTHERS = [preset for preset in PRESETS if preset not in QUICK]
QUICK_FIRST = quick_first(PRESETS, QUICK)
END, LENGTH = 7, 16
# where documents end in each row: a document of length 1; the first and the last token; several early ends; none
ENDS = [[4, 5, 10], [0, 15], [0, 1, 2, 8], []]


def slow(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return cases of a test that are slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def packed(ends: list[list[int]] = ENDS, length: int = LENGTH, seed: int = 0) -> Tensor:
    tokens = torch.randint(END + 1, 320, (len(ends), length), generator=torch.Generator().manual_seed(seed))
    for row, places in zip(tokens, ends, strict=True):
        row[places] = END
    return tokens


def split(row: Tensor, how: bool | str = True) -> list[Tensor]:
    """Return the documents of a row, each with its final end-of-text token, or its first one with "bos"."""
    cuts = [place + (how is True) for place in (row == END).nonzero().flatten().tolist()]
    return list(row.tensor_split([cut for cut in cuts if 0 < cut < len(row)]))


def alone(model: Decoder, tokens_bt: Tensor, how: bool | str = True) -> Tensor:
    """Return the logits of each document alone, at its place in the row."""
    assert model.end_of_text is None
    return torch.cat([torch.cat([model(one[None]) for one in split(row, how)], dim=1) for row in tokens_bt])


def masked(model: Decoder, how: Any = True) -> Decoder:
    other = copy.deepcopy(model)
    other.mask_documents(how, END)
    return other


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("preset", QUICK_FIRST)
def test_packed_documents_equal_single_documents(build: Any, preset: str) -> None:
    model = build(f"model={preset}").double()
    assert_same(masked(model)(packed()), alone(model, packed()))
    # without a mask the logits differ
    assert (model(packed()) - alone(model, packed())).abs().max() > 0.1


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("preset", OVER_THE_SEQUENCE)
def test_packed_documents_equal_single_documents_on_every_backbone_with_loops(
    build: Any, preset: str, backbone: str
) -> None:
    model = build(f"model={preset}", f"backbone={backbone}", "model.loops=2", "size.num_layers=2").double()
    assert_same(masked(model)(packed()), alone(model, packed()))


@pytest.mark.parametrize(("preset", "checkpointing"), [*product(QUICK, [False, True]), *slow(product(OTHERS, [True]))])
def test_gradients_of_packed_documents_equal_the_sum_over_documents(
    build: Any, preset: str, checkpointing: bool
) -> None:
    model = build(f"model={preset}").double()
    other = masked(model)
    other.activation_checkpointing = checkpointing
    along = torch.randn(len(ENDS), LENGTH, 320, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(alone(model, packed()), model.parameters(), along, allow_unused=True)
    assert_same(torch.autograd.grad(other(packed()), other.parameters(), along, allow_unused=True), expected)


def test_moda_without_flash_attention_applies_the_mask(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("model=moda").double()
    expected = alone(model, packed())
    monkeypatch.setattr(depth_merge, "has_flash", lambda *_: False)
    assert_same(masked(model)(packed()), expected)


@pytest.mark.parametrize("preset", quick_first(OVER_THE_SEQUENCE, []))
def test_compiled_decoder_applies_the_mask(build: Any, preset: str) -> None:
    torch.compiler.reset()
    model = build(f"model={preset}", "size.num_layers=2").double()
    other = masked(model)
    compile_sublayers(other, backend="aot_eager")
    assert_same(other(packed()), alone(model, packed()))


@pytest.mark.parametrize("preset", QUICK_FIRST)
def test_mask_applies_under_autocast(build: Any, preset: str) -> None:
    model = build(f"model={preset}")
    with torch.autocast("cpu", torch.bfloat16):
        logits, unmasked, expected = (
            f.float() for f in (masked(model)(packed()), model(packed()), alone(model, packed()))
        )
    assert (logits - expected).norm() < 0.03 * expected.norm()
    assert (unmasked - expected).norm() > 0.2 * expected.norm()


@pytest.mark.parametrize("preset", QUICK_FIRST)
def test_tokens_of_other_documents_have_no_effect(build: Any, preset: str) -> None:
    model = masked(build(f"model={preset}"))
    tokens = packed([[4, 10], [4, 10]])
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 300 + END + 1
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference.nonzero().flatten().tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("preset", QUICK_FIRST)
def test_one_document_equals_the_unmasked_sequence(build: Any, preset: str) -> None:
    model = build(f"model={preset}").double()
    tokens = packed([[], [LENGTH - 1]])
    assert_same(masked(model)(tokens), model(tokens))


@pytest.mark.parametrize(
    ("preset", "backbone"), [*product(QUICK, ["qwen3", "lm1b"]), *slow(product(OTHERS, ["qwen3"]))]
)
def test_pieces_with_cache_equal_single_documents(build: Any, preset: str, backbone: str) -> None:
    model = build(f"model={preset}", f"backbone={backbone}", "model.loops=2", "size.num_layers=2").double()
    other = masked(model)
    cache = other.make_cache(4)
    pieces = [other(piece, cache=cache) for piece in packed().split((5, 1, 1, 6, 3), dim=1)]
    assert_same(torch.cat(pieces, dim=1), alone(model, packed()))


@settings(max_examples=15)
@given(
    ends=st.lists(st.lists(st.integers(0, 11), unique=True, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 11), unique=True, max_size=5).map(sorted),
    preset=st.sampled_from(OVER_THE_SEQUENCE),
    how=st.sampled_from([True, "bos"]),
)
def test_random_documents_in_random_pieces(
    build: Any, ends: list[list[int]], cuts: list[int], preset: str, how: bool | str
) -> None:
    model = build(f"model={preset}", "size.num_layers=2").double()
    other, tokens = masked(model, how), packed(ends, 12)
    cache = other.make_cache()
    with torch.no_grad():
        pieces = [other(piece, cache=cache) for piece in tokens.tensor_split(cuts, dim=1)]
        assert_same(torch.cat(pieces, dim=1), alone(model, tokens, how))
        assert_same(other(tokens), alone(model, tokens, how))


@pytest.mark.parametrize("preset", OVER_THE_SEQUENCE)
def test_generation_continues_the_last_document(build: Any, preset: str) -> None:
    model = build(f"model={preset}")
    prompt = packed([[3]], 9)
    written = generate(masked(model), prompt, 6)
    assert torch.equal(written, generate(masked(model), prompt, 6, use_cache=False))
    assert torch.equal(written[:, 4:], generate(model, prompt[:, 4:], 6))


@pytest.mark.parametrize("preset", QUICK_FIRST)
def test_left_padding_is_a_separate_document(build: Any, preset: str) -> None:
    model = build(f"model={preset}").double()
    tokens, padding = packed([[], [], []], 9), [0, 2, 5]
    padded = torch.stack([row.roll(pad) for row, pad in zip(tokens, padding, strict=True)])
    ends = torch.arange(9) < torch.tensor(padding)[:, None]
    cache = model.make_cache(2)
    # the cache stores where each prompt begins
    logits = torch.cat([model(padded[:, :7], cache=cache, ends_bt=ends[:, :7]), model(padded[:, 7:], cache=cache)], 1)
    for row, text, pad in zip(logits, tokens, padding, strict=True):
        assert_same(row[pad:], model(text[None, : 9 - pad])[0])
