"""Generation: the loop over tokens, and the command."""

import json
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.config.arguments import read_arguments
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.evaluation.generation import Generate, print_stream, text_after, write_text
from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.decoder import Decoder
from depthlm.model.generation import generate
from depthlm.model.parameters import initialize
from depthlm.model.shape import Backbone, Size

PROMPT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    decoder = Decoder(Size("", 64, 128, 3, 4, 2, 16, 97), Backbone(), Residual, SelfAttention)
    initialize(decoder, seed=0, std=0.2)
    return decoder


def test_top_k_and_top_p_sample_only_from_the_tokens_they_keep(model):
    generator = torch.Generator().manual_seed(0)
    prompt = PROMPT[:1].expand(400, -1)
    probabilities, order = model(PROMPT[:1])[0, -1].softmax(0).sort(descending=True)
    drawn = generate(model, prompt, 1, temperature=1.0, top_k=3, generator=generator)[:, -1]
    assert set(drawn.tolist()) <= set(order[:3].tolist())
    drawn = generate(model, prompt, 1, temperature=1.0, top_p=0.5, generator=generator)[:, -1]
    kept = int((probabilities.cumsum(0) - probabilities < 0.5).sum())
    assert set(drawn.tolist()) <= set(order[:kept].tolist())


def test_ids_that_the_tokenizer_lacks_are_not_chosen(model):
    prompt = PROMPT[:1].expand(100, -1)
    best = int(model(PROMPT[:1])[0, -1, :5].argmax())
    for temperature, chosen in ((0.0, {best}), (1e-40, {best}), (5.0, {0, 1, 2, 3, 4})):
        generator = torch.Generator().manual_seed(0)
        drawn = generate(model, prompt, 1, temperature=temperature, generator=generator, vocab_size=5)[:, -1]
        assert set(drawn.tolist()) == chosen


def test_a_row_ends_at_eos(model):
    greedy = generate(model, PROMPT, 12)
    eos = int(greedy[0, 7])
    tokens = generate(model, PROMPT, 12, eos=eos)
    first = (greedy[0, 5:] == eos).nonzero()[0, 0] + 5
    assert (tokens[0, first:] == eos).all()
    assert generate(model, PROMPT[:1], 12, eos=eos).shape[1] == first + 1


LINES = ["the depth", "a stream is read by", "x"]


def write(*arguments: str) -> None:
    write_text(read_arguments(Generate, arguments))


def greedy(directory: Path, prompt: str, tokens: int) -> str:
    model, _ = depthlm.load(directory)
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode_batch([prompt])[0]
    # the bytes, and two special tokens
    continued = generate(model, torch.tensor([ids]), tokens, use_cache=False, vocab_size=258)
    return tokenizer.decode(continued[0, len(ids) :].tolist())


def test_a_prompt_is_printed_and_continued(trained, capsys):
    write(f"run={trained}", "prompt=the depth of", "max_new_tokens=20", "temperature=0")
    assert capsys.readouterr().out == "the depth of" + greedy(trained, "the depth of", 20) + "\n"


def test_neither_the_batch_nor_chunks_of_the_prefill_affect_the_continuation_of_a_prompt(trained, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("\n".join(LINES) + "\n\n")
    for batch_size, chunk in ((1, "null"), (2, "3")):
        write(
            f"run={trained}", f"prompts={tmp_path / 'prompts.txt'}", "max_new_tokens=12", "temperature=0",
            f"batch_size={batch_size}", f"prefill_chunk={chunk}",
        )  # fmt: skip
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert found == [{"prompt": line, "text": greedy(trained, line, 12)} for line in LINES]


def test_a_long_prompt_does_not_shorten_the_continuation_of_another(trained, tmp_path, capsys):
    # the context has 48 tokens
    lines = {"x" * 40: 8, "the depth": 39}
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    write(f"run={trained}", f"prompts={tmp_path / 'prompts.txt'}", "temperature=0")
    found = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert found == [greedy(trained, line, tokens) for line, tokens in lines.items()]


def test_sampling_is_reproducible_by_its_seed(trained, capsys):
    texts = []
    for seed in (1, 1, 2):
        write(f"run={trained}", "prompt=", "max_new_tokens=30", f"seed={seed}", "top_p=0.9")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_text_is_streamed_in_complete_characters(trained, capsys, monkeypatch):
    text = "a é 深 𝄞"
    # a model that generates these bytes, one per token
    script, one_hot = iter(text.encode()), torch.nn.functional.one_hot
    monkeypatch.setattr(Decoder, "logits", lambda *_: one_hot(torch.tensor([[next(script)]]), 320).float())
    write(f"run={trained}", "prompt=b", f"max_new_tokens={len(text.encode())}", "temperature=0")
    assert capsys.readouterr().out == f"b{text}\n"


def test_a_stream_goes_on_after_a_byte_that_ends_no_character(capsys):
    # such a byte makes some tokenizers decode all bytes before it as invalid
    print_stream("b", iter(["深", "\ufffd" * 4, "\ufffd" * 4 + "a", "\ufffd" * 4 + "ab"]))
    assert capsys.readouterr().out == "b深" + "\ufffd" * 3 + "ab\n"


def test_invalid_prompts_are_refused(trained, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("short\n\n" + "x" * 44)
    for given, words in (
        (["prompt=" + "x" * 41, "max_new_tokens=8"], "41 tokens and max_new_tokens=8 are more than the 48"),
        (["max_new_tokens=8"], "give prompt=<text> or prompts=<file>"),
        (["prompt=a", "prompts=b"], "give prompt=<text> or prompts=<file>"),
        (["prompts=/nowhere"], "cannot be read"),
        ([f"prompts={lines}", "max_new_tokens=8"], "line 3: 44 tokens"),
    ):
        with pytest.raises(UserError, match=words):
            write(f"run={trained}", *given)


class Spaced:
    """Decodes like T5's tokenizer, which drops the space at the beginning of a text."""

    def decode(self, ids):
        return "".join(f" {number}" for number in ids).removeprefix(" ")


def test_a_continuation_begins_with_the_space_after_the_prompt():
    assert text_after(Spaced(), [1, 2], [3, 4]) == " 3 4"
    assert text_after(Spaced(), [], [3, 4]) == "3 4"
