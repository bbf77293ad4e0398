"""A prefill in chunks equals one of the whole prompt: every mechanism, mixer and document mask."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from depthlm.evaluation.generation import generate, prefill
from depthlm.locations import CONF
from depthlm.model import Decoder

from .conftest import PRESETS

END, LENGTH = 7, 17
MIXERS = {
    "self": [],
    "latent": ["backbone.mixers=[latent]", "backbone.position=none", "backbone.qk_norm=none"],
    "delta and self": ["backbone.mixers=[delta,attention]"],
    "delta and latent, with experts": ["backbone=kimi_linear", "size.num_experts=4"],
}
# mechanisms that no preset has, as connections
CONNECTIONS = [
    "ddl", "deepnorm", "depth_dense", "depth_qkv", "highway", "layer_scale", "mrla", "rezero", "siamese_norm",
]  # fmt: skip
MECHANISMS = [*(f"model={name}" for name in PRESETS), *(f"model/connection={name}" for name in CONNECTIONS)]
QUICK = {("model=moda", "self"), ("model=depth_attention", "latent"), ("model=dca", "delta and self")}
# each mechanism, and with every mixer those that read keys and values of other layers or have inputs for each of them
COMBINED = [f"model={name}" for name in ("moda", "depth_attention", "value_residual", "shared_kv", "dca")]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in dict.fromkeys([*product(MECHANISMS, ["self"]), *product(COMBINED, MIXERS)])
]


def prompts() -> Tensor:
    """Return three prompts with documents of several lengths, some of which cross the bounds of the chunks."""
    tokens_bt = torch.randint(END + 1, 320, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    for row, ends in zip(tokens_bt, ([4, 5, 10], [0, 15], []), strict=True):
        row[ends] = END
    return tokens_bt


def cached(model: Decoder, chunk: int | None, **settings: Any) -> tuple[Tensor, ...]:
    """Return the logits after the prompts, and all tensors of the cache."""
    cache = model.make_cache(LENGTH)
    with torch.no_grad():
        logits_bv = prefill(model, prompts(), cache, chunk, **settings)
    pairs = [x[:, :, : cache.length] for pair in cache._slots if pair is not None for x in pair]
    return logits_bv, *pairs, *(x for _, state in sorted(cache._states.items()) for x in state)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("mechanism", "mixer"), CASES)
def test_a_prefill_in_chunks_equals_one_of_the_whole_prompt(build: Any, mechanism: str, mixer: str) -> None:
    model = build(mechanism, *MIXERS[mixer]).double()
    for how in (False, True, "bos"):
        model.mask_documents(how, END)
        whole = cached(model, None)
        assert whole[0].isfinite().all()
        with torch.no_grad():
            assert_same(whole[:1], (model(prompts())[:, -1],))
        for chunk in (1, 5, LENGTH):
            assert_same(cached(model, chunk), whole)


def test_the_list_of_connections_is_complete() -> None:
    connections = {path.stem for path in (CONF / "model/connection").glob("*.yaml")}
    assert connections <= {*PRESETS, *CONNECTIONS, "residual"}


@pytest.mark.parametrize("how", [False, True, "bos"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_chunk_may_consist_of_padding(build: Any, mixer: str, how: Any) -> None:
    model = build("model=moda", *MIXERS[mixer]).double()
    model.mask_documents(how, END)
    padding_b = torch.tensor([0, 4, 7])
    whole = generate(model, prompts(), 5, padding_b=padding_b)
    for chunk in (1, 3, 6):
        assert torch.equal(generate(model, prompts(), 5, padding_b=padding_b, prefill_chunk=chunk), whole)
    ends_bt = torch.arange(LENGTH) < padding_b[:, None]
    assert_same(cached(model, 3, ends_bt=ends_bt)[:1], cached(model, None, ends_bt=ends_bt)[:1])


def test_a_forward_pass_has_at_most_the_tokens_of_a_chunk(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = build("model=vanilla"), []
    hidden = model.hidden

    def counted(tokens_bt: Tensor, *rest: Any, **settings: Any) -> Tensor:
        lengths.append(tokens_bt.shape[1])
        return hidden(tokens_bt, *rest, **settings)

    monkeypatch.setattr(model, "hidden", counted)
    generate(model, prompts(), 3, prefill_chunk=6)
    assert lengths == [6, 6, 5, 1, 1]


def test_chunks_need_a_cache(build: Any) -> None:
    model = build("model=vanilla")
    for settings in ({"prefill_chunk": 0}, {"prefill_chunk": 4, "use_cache": False}):
        with pytest.raises(ValueError, match="prefill_chunk"):
            generate(model, prompts(), 1, **settings)
