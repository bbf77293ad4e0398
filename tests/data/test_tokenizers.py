"""Tokenizers of bytes, trained on a text, and from a file.

For each model of a tokenizer.json: text never becomes a special token or the end of text, keeps its characters, and
otherwise has the library's ids.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from depthlm.data import DataError, Tokenizer, bytes_tokenizer, padded_vocab_size, train_bpe, vocab_size
from depthlm.data.settings import Data

ANY_TEXT = st.text(st.characters(codec="utf-8"))
CODE_AND_PROSE = ["def f(x):\n    return x\n", "the cat and the hat — naïve\n"] * 20
SPECIAL = ["<unk>", "<pad>", "</s>"]
# merges and pieces spell special tokens
TEXTS = ["the cat</s>", "a <pad> in the hat</s>\n", "cats and dogs </s></s> <unk><unk> sat", "the <pad><pad> mat"] * 30
BYTES = [f"<0x{b:02X}>" for b in range(256)]


@cache
def built_in(kind: str) -> Tokenizer:
    return bytes_tokenizer() if kind == "bytes" else train_bpe(CODE_AND_PROSE, 300)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@given(text=ANY_TEXT)
@example(text="<|endoftext|><|padding|>")
@example(text="\x00\r\n\u2028\ufeff\U0010ffff e\u0301 \xad\xa0  ")
def test_any_text_round_trips_and_never_encodes_to_a_special_token(kind, text):
    tokenizer = built_in(kind)
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_byte_b_is_token_b_also_where_no_text_has_that_byte():
    tokenizer = built_in("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (258, 256)
    assert tokenizer.decode([0xC3, 0xA9, 256, 0xFF, 257]) == "é<|endoftext|>\ufffd<|padding|>"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_saved_tokenizer_is_the_same(kind, tmp_path):
    tokenizer = built_in(kind)
    loaded = Tokenizer.load(tokenizer.save(tmp_path))
    assert loaded.fingerprint == tokenizer.fingerprint == Tokenizer.load(tmp_path).fingerprint
    text = "the <|endoftext|> cat"
    assert loaded.encode_batch([text]) == tokenizer.encode_batch([text])
    # truncation and padding are off
    encoder = Encoder.from_file(str(tmp_path / "tokenizer.json"))
    encoder.enable_truncation(3)
    encoder.enable_padding(length=40)
    encoder.save(str(tmp_path / "other.json"))
    assert Tokenizer.load(tmp_path / "other.json").encode_batch([text]) == tokenizer.encode_batch([text])


def test_training_gives_the_same_tokenizer_in_another_process():
    code = f"from depthlm.data import train_bpe; print(train_bpe({CODE_AND_PROSE!r}, 300).fingerprint)"
    environment = os.environ | {"PYTHONHASHSEED": "1", "TOKENIZERS_PARALLELISM": "true"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == built_in("bpe").fingerprint


def test_the_vocabulary_size_is_known_without_preparing(tmp_path):
    assert vocab_size(Data(tokenizer="bytes")) == 258
    assert vocab_size(Data(tokenizer="bpe", vocab_size=1000)) == 1000
    file = str(built_in("bpe").save(tmp_path))
    assert vocab_size(Data(tokenizer=file)) == built_in("bpe").vocab_size == 291
    assert padded_vocab_size(Data(tokenizer=file)) == 320
    assert padded_vocab_size(Data(tokenizer="bytes", pad_vocab_multiple=129)) == 258


def test_a_file_that_is_no_tokenizer_or_has_no_end_of_text_is_an_error(tmp_path):
    for content in (None, "{}", "not json", '{"version": "1.0"}'):
        if content is not None:
            Path("tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            Tokenizer.load("tokenizer.json")
    Encoder(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "bare.json"))
    with pytest.raises(DataError, match="no end-of-text token"):
        Tokenizer.load(tmp_path / "bare.json")


def sentencepiece_bpe() -> Encoder:
    """As Llama's: a space is prepended by the normalizer, nothing cuts the text into words, and bytes are pieces."""
    encoder = Encoder(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    encoder.train_from_iterator(TEXTS, trainer)
    record = json.loads(encoder.to_str())
    record["added_tokens"] = [token for token in record["added_tokens"] if token["content"] in SPECIAL]
    encoder = Encoder.from_str(json.dumps(record))
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    encoder.decoder = decoders.Sequence(decoder)
    return encoder


def unigram() -> Encoder:
    """As T5's, but with all characters of TEXTS."""
    encoder = Encoder(models.Unigram())
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    encoder.train_from_iterator(TEXTS, trainer)
    return encoder


def byte_level() -> Encoder:
    """As GPT-2's with words, but merges make the special tokens too."""
    encoder = Encoder(models.BPE(dropout=0.5))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    encoder.train_from_iterator([text.replace(" ", "") for text in TEXTS], trainer)
    encoder.add_tokens([AddedToken("cats", normalized=False)])
    return encoder


def words(model: Callable[..., models.Model]) -> Callable[[], Encoder]:
    def make() -> Encoder:
        vocabulary = [*SPECIAL, "the", "cat", "a", "in", "sat", "hat", "mat", "dogs", "##s"]
        encoder = Encoder(model({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
        encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        encoder.add_special_tokens(SPECIAL)
        return encoder

    return make


KINDS = {
    "sentencepiece_bpe": sentencepiece_bpe, "unigram": unigram, "byte_level": byte_level,
    "word_piece": words(models.WordPiece), "word_level": words(models.WordLevel),
}  # fmt: skip
LOSSLESS = ["sentencepiece_bpe", "unigram", "byte_level"]


@cache
def trained(kind: str) -> str:
    return KINDS[kind]().to_str()


def text_of(kind: str, ordinary: bool = False) -> str:
    """Return the tokenizer.json. ordinary: its end of text is not special, as some files have it."""
    record = json.loads(trained(kind))
    for token in record["added_tokens"]:
        if ordinary and token["content"] == "</s>":
            token["special"] = False
    return json.dumps(record)


@cache
def tokenizer_of(kind: str, ordinary: bool = False) -> Tokenizer:
    return Tokenizer(text_of(kind, ordinary), files={"tokenizer_config.json": {"eos_token": "</s>"}})


PARTS = st.sampled_from(
    ["</s>", "<pad>", "<unk>", "the", "cat", "s", "<", "/", ">", " ", "\n", "a", "</", "</s", "dog"]
)


@pytest.mark.parametrize(
    ("kind", "ordinary"), [*((kind, False) for kind in KINDS), ("sentencepiece_bpe", True), ("word_level", True)]
)
@given(parts=st.lists(PARTS))
@example(parts=["cats", "</s>", "dogs and ", "<unk>"])
@example(parts=["</s>"])
@example(parts=["the ", "</s>", " ", "<pad>"])
def test_no_text_becomes_a_special_token(kind, ordinary, parts):
    tokenizer, text = tokenizer_of(kind, ordinary), "".join(parts)
    (ids,) = tokenizer.encode_batch([text])
    special = {tokenizer.vocabulary()[token] for token in SPECIAL}
    assert not ({*ids} & special) - {tokenizer.unknown}
    assert tokenizer.end_of_text not in ids
    if kind in LOSSLESS:
        assert tokenizer.unknown not in ids
        # apart from the prefix space
        assert tokenizer.decode(ids).strip(" ") == text.strip(" ")


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(["the", "cat", "cats", " ", "\n", "é", "\U0010ffff", "a", "hat", "dogs"])))
def test_other_text_has_the_ids_of_the_library(kind, parts):
    library = Encoder.from_str(text_of(kind))
    library.encode_special_tokens = True
    if kind == "byte_level":
        library.model.dropout = None
    text = "".join(parts)
    assert tokenizer_of(kind).encode_batch([text]) == [library.encode(text, add_special_tokens=False).ids]


def test_dropout_is_off_and_a_tokenizer_that_drops_characters_is_recognized():
    tokenizer = tokenizer_of("byte_level")
    assert (tokenizer.dropout, tokenizer_of("unigram").dropout) == (0.5, None)
    assert len({tuple(ids) for ids in tokenizer.encode_batch(["the cat and the hat"] * 50)}) == 1
    record = json.loads(text_of("sentencepiece_bpe"))
    assert not any(tokenizer_of(kind).drops_unknown for kind in KINDS)
    record["model"] |= {"unk_token": None, "byte_fallback": False}
    tokenizer = Tokenizer(json.dumps(record))
    assert tokenizer.decode(tokenizer.encode_batch(["the 五 cat"])[0]) == "the  cat"
    assert tokenizer.drops_unknown


def test_an_unknown_token_that_is_the_end_of_text_is_refused_where_it_occurs():
    tokenizer = Tokenizer(text_of("word_level"), end_of_text="<unk>")
    assert tokenizer.encode_batch(["the cat"]) == [[3, 4]]
    with pytest.raises(DataError, match=r"'<unk>', is also what .* unknown text"):
        tokenizer.encode_batch(["the dog"])


def test_the_end_of_text_is_no_unknown_text():
    text = json.loads(text_of("byte_level"))
    text["model"]["unk_token"] = "</s>"
    assert Tokenizer(json.dumps(text), end_of_text="</s>").unknown is None


DOCUMENT = "".join(f"the cat{'s' * (k % 3)}\n{' ' * (k % 4)}a </s> in{'  ' * (k % 2)} the hat\n\n" for k in range(40))


@pytest.mark.parametrize("kind", [*KINDS, "collapsed"])
def test_a_document_in_parts_has_the_ids_of_the_whole(kind, monkeypatch):
    from depthlm.data.preparation import encode

    monkeypatch.setattr(encode, "LONGEST", 7)
    monkeypatch.setattr(encode, "CONTEXT", 200)
    tokenizer = tokenizer_of("unigram" if kind == "collapsed" else kind)
    if kind == "collapsed":
        # as T5 does: no space at either end, and one between two words
        encoder = Encoder.from_str(tokenizer.text)
        encoder.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")])
        tokenizer = Tokenizer(encoder.to_str())
    # a word is not cut at the end, where few places are left
    assert [part for _, part in encode.cut("the cat the cat", tokenizer)][-1] != "cat"
    before, parts = zip(*encode.cut(DOCUMENT, tokenizer), strict=True)
    assert "".join(parts) == DOCUMENT
    assert max(map(len, parts)) <= 2 * 7
    encoded = tokenizer.encode_batch(parts, before)
    assert [token for ids in encoded for token in ids] == tokenizer.encode_batch([DOCUMENT])[0]
