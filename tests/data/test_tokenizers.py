import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from depthlm.data import DataError, Tokenizer, bytes_tokenizer, padded_vocab_size, train_bpe, vocab_size
from depthlm.data.settings import Data

ANY_TEXT = st.text(st.characters(codec="utf-8"))
TEXTS = ["def f(x):\n    return x\n", "the cat and the hat — naïve\n"] * 20


@cache
def made(kind: str) -> Tokenizer:
    return bytes_tokenizer() if kind == "bytes" else train_bpe(TEXTS, 300)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@given(text=ANY_TEXT)
@example(text="<|endoftext|><|padding|>")
@example(text="\x00\r\n\u2028\ufeff\U0010ffff e\u0301 \xad\xa0  ")
def test_any_text_round_trips_and_never_encodes_to_a_special_token(kind: str, text: str) -> None:
    tokenizer = made(kind)
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@given(ANY_TEXT)
def test_byte_b_is_token_b(text: str) -> None:
    assert bytes(made("bytes").encode_batch([text])[0]) == text.encode()


def test_every_byte_has_its_token_even_bytes_that_are_never_in_utf8() -> None:
    tokenizer = made("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (258, 256)
    assert tokenizer.decode([0xC3, 0xA9, 256, 0xFF, 257]) == "é<|endoftext|>\ufffd<|padding|>"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_saved_tokenizer_is_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = made(kind)
    loaded = Tokenizer.load(tokenizer.save(tmp_path))
    assert loaded.fingerprint == tokenizer.fingerprint == Tokenizer.load(tmp_path).fingerprint
    text = "the <|endoftext|> cat"
    assert loaded.encode_batch([text]) == tokenizer.encode_batch([text])


def test_truncation_and_padding_of_a_loaded_tokenizer_are_disabled(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Encoder

    encoder = Encoder.from_file(str(made("bpe").save(tmp_path)))
    encoder.enable_truncation(3)
    encoder.enable_padding(length=8)
    encoder.save(str(tmp_path / "other.json"))
    tokenizer = Tokenizer.load(tmp_path / "other.json")
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(["a", TEXTS[0]])] == ["a", TEXTS[0]]


def test_training_gives_the_same_tokenizer_in_another_process() -> None:
    code = f"from depthlm.data import train_bpe; print(train_bpe({TEXTS!r}, 300).fingerprint)"
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": "true"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == made("bpe").fingerprint


def test_the_vocabulary_size_is_known_without_preparing(tmp_path: Path) -> None:
    assert vocab_size(Data(tokenizer="bytes")) == 258
    assert vocab_size(Data(tokenizer="bpe", vocab_size=1000)) == 1000
    file = str(made("bpe").save(tmp_path))
    assert vocab_size(Data(tokenizer=file)) == made("bpe").vocab_size == 291
    assert padded_vocab_size(Data(tokenizer=file)) == 320
    assert padded_vocab_size(Data(tokenizer="bytes", pad_vocab_multiple=1)) == 258
    assert padded_vocab_size(Data(tokenizer="bytes", pad_vocab_multiple=129)) == 258


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"version": "1.0"}'])
def test_a_file_that_is_not_a_tokenizer_is_an_error(content: str | None) -> None:
    if content is not None:
        Path("tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.load("tokenizer.json")


def test_a_tokenizer_without_an_end_of_text_is_an_error(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Encoder
    from tokenizers import models

    Encoder(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "bare.json"))
    with pytest.raises(DataError, match="no end-of-text token"):
        Tokenizer.load(tmp_path / "bare.json")
