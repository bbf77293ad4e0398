"""A decoder behind transformers' interface, in this process: masks, caches, losses, and refused arguments."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import depthlm
from depthlm.hugging_face.folder import as_causal_lm, as_tokenizer
from depthlm.model import Decoder

# of transformers, which takes seconds to import, and ours
Wrapped = tuple[Any, Decoder]


@pytest.fixture
def wrap(make_run: Callable[..., Path]) -> Callable[..., Wrapped]:
    def make(*overrides: str) -> Wrapped:
        model, config = depthlm.load(make_run(*overrides))
        return as_causal_lm(model, config), model

    return make


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("side", "overrides"),
    [("right", []), ("left", ["data.document_mask=bos"])],
)
def test_padding_does_not_change_logits(wrap, overrides, side):
    causal, decoder = wrap("model=depth_attention", *overrides)
    rows, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    rows[:, 5] = 256
    real = [slice(4 * i, 12) if side == "left" else slice(0, 12 - 4 * i) for i in range(3)]
    for row, part in enumerate(real):
        mask[row] = 0
        mask[row, part] = 1
    with torch.no_grad():
        logits = causal(rows, attention_mask=mask).logits
        for row, part in enumerate(real):
            torch.testing.assert_close(logits[row, part], decoder(rows[row, None, part])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("cache_given", "overrides"), [(False, []), (True, ["data.document_mask=true"])])
def test_a_cache_is_filled_in_parts_cropped_and_reordered(wrap, overrides, cache_given):
    from transformers import DynamicCache

    causal, _ = wrap("model=moda", "model.loops=2", *overrides)
    rows, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    rows[0, 3] = rows[1, 7] = 256
    mask[1, :2] = 0
    order = torch.tensor([1, 0])
    with torch.no_grad():
        whole = causal(rows, attention_mask=mask, use_cache=False).logits
        cache = causal(
            rows[:, :6], attention_mask=mask[:, :6], past_key_values=DynamicCache() if cache_given else None
        ).past_key_values
        causal(tokens(2, 3), attention_mask=torch.ones(2, 9, dtype=torch.long), past_key_values=cache)
        cache.crop(-3)
        cache.reorder_cache(order)
        for start, end in ((6, 7), (7, 12)):
            part = causal(rows[order, start:end], attention_mask=mask[order, :end], past_key_values=cache)
            torch.testing.assert_close(part.logits, whole[order, start:end], rtol=1e-5, atol=1e-5)
    assert cache.get_seq_length() == 12


def test_loss_gradients_and_bf16_generation(wrap):
    causal, decoder = wrap("model=mhc", "backbone.tie_embeddings=true")
    labels = tokens(2, 9)
    labels[:, :4] = -100
    loss = causal(tokens(2, 9), labels=labels).loss
    sums = decoder(tokens(2, 9)[:, :-1], labels[:, 1:])
    torch.testing.assert_close(loss, sums.nll / sums.tokens)
    loss.backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    assert causal.get_input_embeddings().weight is decoder.embedding.weight
    assert causal.to(torch.bfloat16).generate(tokens(2, 5), max_new_tokens=3, pad_token_id=257).shape == (2, 8)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mhc"],
        # keys and values of a latent attention with inputs of their own
        ["model=dca", "backbone=kimi_linear", "backbone.mixers=[delta,latent]", "size.num_layers=2"],
    ],
)
def test_adapters_change_what_their_layers_compute(wrap, overrides):
    peft = pytest.importorskip("peft")
    causal, decoder = wrap(*overrides)
    by_hand = copy.deepcopy(decoder)
    names = [name for name, module in causal.named_modules() if isinstance(module, torch.nn.Linear)]
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=names, init_lora_weights=False)
    adapted = peft.get_peft_model(causal, settings).eval()
    with torch.no_grad():
        for name in names:
            layer = adapted.base_model.model.get_submodule(name)
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            by_hand.get_submodule(name.removeprefix("decoder.")).weight += 6 / 2 * up @ down
        expected = by_hand(tokens(2, 9))
        torch.testing.assert_close(adapted(input_ids=tokens(2, 9)).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(adapted.merge_and_unload()(tokens(2, 9)).logits, expected, rtol=1e-4, atol=1e-4)


def test_unsupported_arguments_are_refused(wrap):
    causal, _ = wrap()
    mask = torch.tensor([[1, 1, 0, 1]])
    with pytest.raises(ValueError, match="padding between its tokens; pad prompts on the left"):
        causal(tokens(1, 4), attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask \[1, 3\]: must be \[batch, 4\]"):
        causal(tokens(1, 4), attention_mask=mask[:, :3])
    for name in ("position_ids", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name}: a depthlm model does not take it"):
            causal(tokens(1, 4), **{name: torch.arange(4)[None]})
    assert causal(tokens(1, 4), output_attentions=False, position_ids=None).logits.shape == (1, 4, 320)
    # as from_pretrained(..., output_hidden_states=True) sets it
    causal.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states: a depthlm model does not take it"):
        causal(tokens(1, 4))


def test_the_vocabulary_can_be_resized(wrap):
    causal, decoder = wrap("model=mhc")
    # ids with which the vocabulary is padded; those of tokens that are added can be chosen
    causal.generation_config.suppress_tokens = [5, 318, 319]
    with torch.no_grad():
        before = causal(tokens(1, 4)).logits
        assert causal.resize_token_embeddings(330, pad_to_multiple_of=8) is decoder.embedding
        logits = causal(tokens(1, 4), labels=torch.full((1, 4), 335)).logits
        assert torch.equal(logits[..., :320], before)
        # of a row that is the mean of all
        torch.testing.assert_close(logits[..., 335], before.mean(-1))
        assert causal.generation_config.suppress_tokens == [5, *range(330, 336)]
        causal.resize_token_embeddings(pad_to_multiple_of=64)
        assert causal.generation_config.suppress_tokens == [5, *range(330, 384)]
        causal.resize_token_embeddings(300)
        assert torch.equal(causal(tokens(1, 4)).logits, before[..., :300])
    assert causal.config.vocab_size == causal.config.size["vocab_size"] == 300


def test_gradient_checkpointing_changes_no_gradient(wrap):
    causal, decoder = wrap("model=moda")
    cache = causal(tokens(2, 3)).past_key_values

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(causal(tokens(2, 9), labels=tokens(2, 9)).loss, [*decoder.parameters()])

    before, calls = gradients(), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    decoder.layers[0].mlp.register_forward_hook(count)
    causal.gradient_checkpointing_enable()
    assert all(torch.equal(one, other) for one, other in zip(before, gradients(), strict=True))
    assert (calls, causal.is_gradient_checkpointing) == (2, True)
    with pytest.raises(ValueError, match="past_key_values: gradient checkpointing"):
        causal(tokens(2, 3), past_key_values=cache)
    causal.gradient_checkpointing_disable()
    assert not decoder.activation_checkpointing


def test_the_tokenizer_adds_no_tokens(tmp_path):
    from tokenizers import Tokenizer as Encoder
    from tokenizers.processors import TemplateProcessing

    from depthlm.data import Tokenizer, bytes_tokenizer

    encoder = Encoder.from_str(bytes_tokenizer().text)
    encoder.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    encoder.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = Tokenizer.load(tmp_path), as_tokenizer(Tokenizer.load(tmp_path))
    assert theirs("ab").input_ids == ours.encode_batch(["ab"])[0] == [97, 98]
    assert (theirs.pad_token, theirs.eos_token, theirs.padding_side) == ("<|padding|>", "<|endoftext|>", "left")
