import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthlm.data import DataError, Manifest, open_corpus, prepare, token_folders, vocab_size
from depthlm.data.corpora.documents import hash_share
from depthlm.data.settings import Data, Source

from .preparing import content, left_over


def test_the_bytes_depend_neither_on_the_folder_nor_on_the_batch_size(local, monkeypatch):
    settings = [{"max_tokens": None}, {"max_tokens": 700}]
    whole = [content(prepare(local(**changes))["local"]) for changes in settings]
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 100)
    for changes, expected in zip(settings, whole, strict=True):
        assert content(prepare(local(path=f"again-{changes['max_tokens']}", **changes))["local"]) == expected


def test_only_settings_that_change_the_bytes_change_the_folder(local, tmp_path):
    (tmp_path / "copy").mkdir()
    changes = [
        {}, {"tokenizer": "bytes"}, {"vocab_size": 400}, {"validation_fraction": 0.1}, {"suffixes": [".txt"]},
        {"source": str(tmp_path / "copy")}, {"name": "other"}, {"max_tokens": 5}, {"shard_tokens": 7},
        {"files": "*0.txt"}, {"validation_files": "*0.txt"}, {"text_field": "body"},
    ]  # fmt: skip
    folders = [next(iter(token_folders(local(**change)).values())) for change in changes]
    assert len(set(folders)) == len(changes)
    irrelevant = [
        {"num_workers": 4}, {"fraction": 0.5}, {"pad_vocab_multiple": 1}, {"source": "text"}, {"shuffle_seed": 3},
        {"document_mask": True}, {"on_bad_document": "skip"}, {"text_bytes": 5}, {"max_document_bytes": 9},
    ]  # fmt: skip
    for same in irrelevant:
        assert token_folders(local(**same)) == token_folders(local())
    assert token_folders(local(tokenizer="bytes", vocab_size=999)) == token_folders(local(tokenizer="bytes"))
    of_python = [{}, {"files": "json/*"}, {"validation_files": "json/*"}, {"validation_files": "email/*"}]
    assert len({token_folders(Data(name="stdlib", **change))["stdlib"] for change in of_python}) == len(of_python)


def test_the_share_that_is_held_out_of_a_single_file_changes_its_folder_also_beside_patterns():
    mirrored = Data(name="c4", source="c4-train.00000.json.gz", validation_files="*val*", tokenizer="bytes")
    assert token_folders(mirrored) != token_folders(replace(mirrored, validation_fraction=0.2))


def test_the_folder_of_a_validation_set_depends_on_the_documents_that_train_the_tokenizer(local):
    validation = {"further": Source(source=local().source)}
    shared = [token_folders(local(validation=validation, held_out_by=by))["further"] for by in ("content", "name")]
    assert len({*shared}) == 2


def test_token_files_of_another_tokenizer_are_an_error_before_anything_is_encoded(local):
    books = prepare(local(tokenizer="bytes"))["local"]
    mixture = {"books": Source(path=str(books)), "web": Source(source=local().source)}
    with pytest.raises(DataError, match=rf"another tokenizer .* prepared now: .*{books.name}"):
        prepare(Data(name="mixture", sources=mixture, tokenizer=f"{prepare(local())['local']}/tokenizer.json"))
    assert not list(Path("data/tokens").glob("web-*.partial/*.bin"))


def test_token_files_at_a_path_are_used_as_they_are(local):
    prepare(local(path="tokens", vocab_size=5000))
    bare = Data(name="pile", path="tokens")
    assert prepare(bare) == {"pile": Path("tokens")}
    assert list(open_corpus(bare).validation) == ["pile"]
    # the text is too short for 5000 tokens, but vocab_size must not change once the tokens are made
    assert open_corpus(bare).tokenizer.vocab_size < 5000 == vocab_size(bare)
    with pytest.raises(DataError, match="vocab_size: prepared 5000, requested 300"):
        prepare(local(path="tokens"))


def test_a_corpus_is_not_prepared_again_if_it_is_renamed_or_its_text_changes(local, text_folder, capsys):
    folder = prepare(local())["local"]
    assert "prepared" in capsys.readouterr().err
    times = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert prepare(local()) == {"local": folder}
    assert times == {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    renamed = local(name="renamed")
    assert prepare(renamed) == {"renamed": folder}
    assert capsys.readouterr().err == ""
    assert open_corpus(renamed).digest() == open_corpus(local()).digest()
    assert list(open_corpus(renamed).validation) == ["renamed"]
    assert [path.name for path in Path("data/tokens").iterdir() if path.is_dir()] == [folder.name]
    # other settings, of which no token files exist
    assert prepare(local(name="renamed", vocab_size=290))["renamed"].name.startswith("renamed-")
    (text_folder / "new.txt").write_text("new")
    prepare(local())
    assert "has changed since" in capsys.readouterr().err
    assert times == {file: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_a_document_longer_than_a_token_file_and_a_batch_stays_one_document(local, monkeypatch):
    whole = prepare(local(tokenizer="bytes", path="whole"))["local"]
    monkeypatch.setattr("depthlm.data.preparation.encode.LONGEST", 100)
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    cut = prepare(local(tokenizer="bytes", path="cut", shard_tokens=200))["local"]
    parts = [content(cut)[shard.name] for shard in Manifest.read(cut).train.files]
    assert len(parts[0]) == 2 * 200
    assert b"".join(parts) == content(whole)["train-00000.bin"]
    assert Manifest.read(cut).train.documents == Manifest.read(whole).train.documents


def test_a_folder_with_other_files_is_not_touched_and_one_that_cannot_be_written_is_an_error(local, monkeypatch):
    Path("precious").mkdir()
    Path("precious/thesis.tex").write_text("years")
    with pytest.raises(DataError, match="empty folder"):
        prepare(local(path="precious"))
    assert content(Path("precious")) == {"thesis.tex": b"years"}
    with pytest.raises(DataError, match="cannot prepare token files"):
        prepare(local(path="precious/thesis.tex/tokens"))
    # a mount point cannot be renamed
    Path("mounted").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    with pytest.raises(DataError, match="empty folder, no mount point"):
        prepare(local(path="mounted"))


def test_of_a_few_documents_one_is_held_out(tmp_path):
    (tmp_path / "few").mkdir()
    for name in "abcdefgh":
        (tmp_path / "few" / f"{name}.txt").write_text(name * 100)
    data = Data(name="local", source="few", tokenizer="bytes", validation_fraction=0.001)
    manifest = Manifest.read(prepare(data)["local"])
    assert (manifest.train.documents, manifest.validation["local"].documents) == (7, 1)
    # by name, it is the one whose name has the lowest hash, whatever is in it
    lowest = min("abcdefgh", key=lambda name: hash_share(f"{name}.txt"))
    by_name = dataclasses.replace(data, held_out_by="name")
    prepare(by_name)
    assert token_folders(by_name) != token_folders(data)
    (held_out,) = {*open_corpus(by_name).validation["local"].read(0, 100).tolist()}
    assert held_out == ord(lowest)


def test_empty_text_or_a_single_document_is_an_error_and_creates_no_folder(tmp_path):
    (tmp_path / "text").mkdir()
    data = Data(name="local", source="text", on_bad_document="skip")
    folder = token_folders(data)["local"]
    for content_of_file, words in ((b"", "1 empty documents"), (b"\xff", "not UTF-8"), (b"one", "more documents")):
        (tmp_path / "text" / "a.txt").write_bytes(content_of_file)
        with pytest.raises(DataError, match=words):
            prepare(data)
        assert not folder.exists()


def test_each_source_of_a_mixture_gets_its_share_of_max_tokens_and_further_sets_are_held_out_completely(
    local, text_folder, tmp_path
):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a.txt").write_text("held out text")
    data = Data(
        name="mix", vocab_size=300, validation_fraction=0.2, max_tokens=1000,
        sources={
            "low": Source(source=str(text_folder), files="part0/*", weight=3),
            "high": Source(source=str(text_folder), files="part[12]/*", weight=1),
        },
        validation={"further": Source(source="held")},
    )  # fmt: skip
    assert list(prepare(data, only=["high"])) == ["high"]
    with pytest.raises(DataError, match=r"no such source: hihg\. There are: low, high, further"):
        prepare(data, only=["hihg"])
    folders = prepare(data)
    assert list(folders) == ["low", "high", "further"]
    corpus = open_corpus(data)
    assert {name: len(tokens) for name, tokens in corpus.train.items()} == {"low": 750, "high": 250}
    assert list(corpus.validation) == ["low", "high", "further"]
    held = corpus.validation["further"]
    assert corpus.tokenizer.decode(held.read(0, len(held))) == "held out text<|endoftext|>"
    # without max_tokens the weights do not change the folders
    again = dataclasses.replace(data, max_tokens=None)
    first = prepare(again)
    again.sources["low"] = replace(again.sources["low"], weight=7)
    assert prepare(again) == first


def test_too_little_space_is_an_error_before_anything_is_written(local, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(DataError, match=r"will take about .*, and 10 bytes are free"):
        prepare(local())
    assert left_over(token_folders(local())["local"]) == set()


def word_level(folder: Path, *words: str) -> str:
    """Write a tokenizer of these words and return its path."""
    from tokenizers import Tokenizer as Encoder
    from tokenizers import models, pre_tokenizers

    encoder = Encoder(models.WordLevel({"<unk>": 0} | {w: n for n, w in enumerate(words, 1)}, unk_token="<unk>"))
    encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder.add_special_tokens(["<unk>", "</s>"])
    folder.mkdir()
    encoder.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_unknown_tokens_are_counted_and_many_of_them_are_refused(tmp_path, capsys, monkeypatch):
    # of 10 tokens of a document, the last one its end, one is unknown
    texts = [" ".join("one" if n >> k & 1 else "two" for k in range(8)) + " three" for n in range(200)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = word_level(tmp_path / "words", "one", "two")
    data = Data(name="own", source="a.jsonl", tokenizer=tokenizer, validation_fraction=0.2, path="tokens")
    manifest = Manifest.read(prepare(data)["own"])
    for split in (manifest.train, manifest.validation["own"]):
        assert split.unknown == split.documents == split.tokens / 10
        assert split.unknown_share == 0.1
    words = "10.0% of the tokens stand for text that the tokenizer does not know"
    assert f"warning: tokens, validation-own: {words}" in capsys.readouterr().err.replace(f"{tmp_path}/", "")
    prepare(data)
    assert f"warning: tokens, train: {words}" in capsys.readouterr().err
    tighter = dataclasses.replace(data, max_unknown=0.09, path="other")
    with pytest.raises(DataError, match=r"10.0% of 2,000 tokens .*data.max_unknown=0\.11"):
        prepare(tighter)
    # a large corpus is refused long before its end
    for name, number in (("MIN_CHECKED_TOKENS", 100), ("BATCH", 1000)):
        monkeypatch.setattr(f"depthlm.data.preparation.encode.{name}", number)
    with pytest.raises(DataError, match=r"10.0% of \d\d\d tokens"):
        prepare(dataclasses.replace(tighter, path="third"))
    assert Manifest.read(prepare(dataclasses.replace(data, path="other"))["own"]) == manifest
