import hashlib
import json
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._utils import ExceptionWrapper

from depthlm.data import (
    DataError,
    Manifest,
    TokenFiles,
    open_corpus,
    prepare,
    verify,
)
from depthlm.data.corpora.documents import documents, is_validation
from depthlm.data.corpora.sources import text_files
from depthlm.data.preparation.progress import SplitWriter
from depthlm.data.settings import Data


@settings(max_examples=40)
@given(
    parts=st.lists(st.lists(st.integers(0, 99), max_size=30), min_size=1, max_size=8),
    shard_tokens=st.integers(1, 40),
    dtype=st.sampled_from(["uint16", "uint32"]),
    data=st.data(),
)
def test_any_range_of_tokens_is_read_across_files(tmp_path_factory, parts, shard_tokens, dtype, data):
    folder = tmp_path_factory.mktemp("tokens")
    writer = SplitWriter(folder, "train", dtype, 100, shard_tokens)
    for part in parts:
        writer.add(np.array(part, dtype=np.int64), 1, 1)
    split, whole = writer.finish(), [token for part in parts for token in part]
    assert split.tokens == len(whole) == sum(shard.tokens for shard in split.files)
    assert all(shard.tokens == shard_tokens for shard in split.files[:-1])
    tokens = TokenFiles(folder, split.files, dtype)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    for files in (tokens, pickle.loads(pickle.dumps(tokens))):
        content = files.read(start, count)
        assert content.dtype == np.int64
        assert content.tolist() == whole[start : start + count]
    with pytest.raises(IndexError):
        tokens.read(start, len(whole) - start + 1)


def test_an_id_beyond_the_vocabulary_names_its_file_and_how_to_verify_it(tmp_path):
    writer = SplitWriter(tmp_path, "train", "uint16", 300, 4)
    writer.add(np.array([1, 99, 100, 3, 7, 200], dtype=np.int64), 1, 1)
    tokens = TokenFiles(tmp_path, writer.finish().files, "uint16", vocab_size=200)
    assert tokens.read(0, 5).tolist() == [1, 99, 100, 3, 7]
    with pytest.raises(DataError, match="the id 200, and the vocabulary has 200 tokens") as caught:
        tokens.read(2, 4)
    assert "train-00001.bin" in str(caught.value)
    assert "--verify" in str(caught.value)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_files_hold_each_document_of_its_split_followed_by_end_of_text(local, tokenizer):
    data = local(tokenizer=tokenizer)
    prepare(data)
    corpus = open_corpus(data)
    splits = {False: (corpus.train["local"], corpus.manifests["local"].train)}
    splits[True] = corpus.validation["local"], corpus.manifests["local"].validation["local"]
    for held_out, (tokens, split) in splits.items():
        named_texts = documents(text_files("local", data).train, "text")
        texts = [text for _, text in named_texts if is_validation(text, 0.2) == held_out]
        ids = tokens.read(0, len(tokens))
        ends = np.flatnonzero(ids == corpus.tokenizer.end_of_text)
        starts = [0, *(ends[:-1] + 1)]
        assert [corpus.tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)] == texts
        assert (split.tokens, split.documents) == (len(tokens), len(texts))
        assert ends[-1] == len(ids) - 1
        assert split.bytes == sum(len(text.encode()) for text in texts)


def test_the_digests_are_those_of_the_files_and_the_entropy_that_of_the_train_tokens(local):
    folder = prepare(local())["local"]
    manifest = Manifest.read(folder)
    listed = {shard.name: shard.sha256 for split in manifest.splits().values() for shard in split.files}
    listed |= {"tokenizer.json": manifest.tokenizer}
    actual = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    actual.pop("manifest.json")
    assert listed == actual
    verify(folder)
    corpus = open_corpus(local())
    counts = Counter(corpus.train["local"].read(0, corpus.tokens).tolist())
    shares = [count / sum(counts.values()) for count in counts.values()]
    assert corpus.unigram_entropy == pytest.approx(-sum(share * math.log(share) for share in shares), rel=1e-12)


def test_max_tokens_and_fraction_prepare_and_train_on_the_first_tokens(local):
    prepare(local())
    prepare(local(max_tokens=400))
    whole, cut = open_corpus(local()), open_corpus(local(max_tokens=400))
    assert cut.tokens == 400 < cut.manifests["local"].train.tokens < whole.tokens
    assert cut.train["local"].read(0, 400).tolist() == whole.train["local"].read(0, 400).tolist()
    held = cut.validation["local"]
    assert held.read(0, len(held)).tolist() == whole.validation["local"].read(0, len(held)).tolist()
    prepare(local(max_tokens=10**9))
    assert open_corpus(local(max_tokens=10**9)).tokens == whole.tokens
    half = open_corpus(local(fraction=0.5))
    assert half.folders == whole.folders
    assert half.tokens == math.ceil(whole.tokens / 2)
    assert len(half.validation["local"]) == len(whole.validation["local"])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


def _change(manifest: Path, **values: object) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | values))


NO_TOKENS = {"tokens": None, "documents": 1, "bytes": 1, "files": []}
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("train-00000.bin", lambda file: os.truncate(file, file.stat().st_size - 2), "bytes where the manifest says"),
    ("train-00000.bin", Path.unlink, "is missing"),
    ("manifest.json", lambda file: file.write_text('{"version": 1'), "not a manifest"),
    ("manifest.json", Path.unlink, "no token files"),
    ("manifest.json", lambda file: _change(file, version=0), "version 0"),
    ("manifest.json", lambda file: _change(file, dtype="float99"), "not a manifest"),
    ("manifest.json", lambda file: _change(file, train=NO_TOKENS), "not a manifest"),
    ("tokenizer.json", lambda file: file.write_text(file.read_text() + "\n"), "not the one"),
]


def test_opening_damaged_token_files_is_an_error_and_verify_finds_one_flipped_bit(local):
    folder = prepare(local())["local"]
    for name, damage, message in DAMAGES:
        content = (folder / name).read_bytes()
        damage(folder / name)
        with pytest.raises(DataError, match=message) as caught:
            open_corpus(local())
        assert str(folder) in str(caught.value)
        (folder / name).write_bytes(content)
    _flip(folder / "validation-local-00000.bin")
    with pytest.raises(DataError, match="validation-local-00000"):
        verify(folder)


def test_tokens_of_another_tokenizer_than_the_run_has_are_refused(local):
    prepare(local())
    prepare(local(tokenizer="bytes"))
    tokenizer = open_corpus(local()).tokenizer
    open_corpus(local(), tokenizer)
    with pytest.raises(DataError, match="prepared with another tokenizer than the run's"):
        open_corpus(local(tokenizer="bytes"), tokenizer)


def test_an_error_of_a_process_that_prefetches_stays_a_data_error():
    try:
        raise DataError("the file has become shorter", "train-00000.bin", "Prepare it again.")
    except DataError:
        wrapped = ExceptionWrapper(where="in a worker")
    with pytest.raises(DataError, match=r"the file has become shorter: train-00000\.bin\. Prepare it again\."):
        wrapped.reraise()


def test_a_vocabulary_above_16_bits_is_stored_as_uint32(local):
    data = local(vocab_size=70_000)
    assert Manifest.read(prepare(data)["local"]).dtype == "uint32"
    corpus = open_corpus(data)
    assert corpus.train["local"].read(0, 5).max() < corpus.tokenizer.vocab_size


def test_a_path_may_have_more_tokens_than_requested_but_not_fewer(local):
    prepare(local(path="tokens", max_tokens=500))
    assert open_corpus(local(path="tokens", max_tokens=300)).tokens == 300
    for requested in (501, None):
        with pytest.raises(DataError, match="only the first 500 tokens were prepared"):
            prepare(local(path="tokens", max_tokens=requested))
    # without a source of text, the tokens there are all there are
    assert open_corpus(Data(name="local", path="tokens", max_tokens=10**6)).tokens >= 500
