import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthlm.config.schema import Data, Source
from depthlm.data import DataError, Manifest, open_corpus, prepare, token_folders, vocab_size
from depthlm.data.documents import REASONS, Reader
from depthlm.data.encode import encode
from depthlm.data.progress import ProgressFile

Local = Callable[..., Data]

# Preparing once told to, slowed down, so that a kill can fall into any part of it.
SLOW = """
import sys, time
from depthlm.config.schema import Data
from depthlm.data import encode, prepare
from depthlm.data.split_writer import SplitWriter
encode.BATCH = 200
add = SplitWriter.add
SplitWriter.add = lambda *given: (time.sleep(0.005), add(*given))
print("ready", flush=True)
sys.stdin.readline()
prepare(Data(name="local", source=sys.argv[1], vocab_size=300, validation_fraction=0.2, shard_tokens=500))
"""


def ready(source: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        pytest.fail(process.communicate()[1])
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def left_over(folder: Path) -> set[str]:
    """What lies beside a folder of token files, locks aside."""
    return {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"} - {folder.name}


def test_preparing_again_does_nothing(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(local())["local"]
    assert "prepared" in capsys.readouterr().err
    times = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert prepare(local()) == {"local": folder}
    assert times == {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert capsys.readouterr().err == ""


def test_the_same_text_and_settings_give_the_same_bytes(local: Local, tmp_path: Path) -> None:
    first = prepare(local(), progress=False)["local"]
    second = prepare(local(path="elsewhere/tokens"), progress=False)["local"]
    assert second == Path("elsewhere/tokens")
    assert content(first) == content(second)


def test_the_bytes_do_not_depend_on_how_much_is_encoded_at_once(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [{"max_tokens": None}, {"max_tokens": 700}]
    whole = [content(prepare(local(**changes))["local"]) for changes in settings]
    monkeypatch.setattr("depthlm.data.encode.BATCH", 100)
    for changes, expected in zip(settings, whole, strict=True):
        assert content(prepare(local(path=f"again-{changes['max_tokens']}", **changes))["local"]) == expected


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_next_calls_go_on_and_give_the_same_bytes(
    local: Local, text_folder: Path, kills: int
) -> None:
    data = local(shard_tokens=500)
    folder = token_folders(data)["local"]
    whole = content(prepare(local(path="whole", shard_tokens=500))["local"])
    assert len(whole) > 8
    chance, begun, went_on = random.Random(kills), set(), 0
    for _ in range(kills):
        process = ready(text_folder)
        go(process)
        time.sleep(chance.uniform(0.05, 0.35))
        process.send_signal(signal.SIGKILL)
        went_on += "going on" in process.communicate()[1]
        begun |= left_over(folder) if folder.parent.exists() else set()
        if folder.exists():
            assert content(folder) == whole
            shutil.rmtree(folder)
    assert begun == {f"{folder.name}.partial"}
    assert went_on
    prepare(data)
    assert content(folder) == whole
    assert left_over(folder) == set()


def test_what_was_killed_goes_on_from_its_last_whole_file(
    local: Local, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = local(shard_tokens=500)
    whole = content(prepare(local(path="whole", shard_tokens=500))["local"])
    monkeypatch.setattr("depthlm.data.encode.BATCH", 200)
    saves = 0

    def killed(self: ProgressFile, *given: object) -> None:
        nonlocal saves
        saves += 1
        if saves == 4:
            raise KeyboardInterrupt
        save(self, *given)

    save = ProgressFile.save
    monkeypatch.setattr(ProgressFile, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(data)
    monkeypatch.setattr(ProgressFile, "save", save)
    read = []
    lines = Reader.records
    monkeypatch.setattr(Reader, "records", lambda self, first=0: read.append(self.file.name) or lines(self, first))
    capsys.readouterr()
    folder = prepare(data)["local"]
    assert "going on with" in capsys.readouterr().err
    assert content(folder) == whole
    assert read[-1] == "part2/8.txt"
    assert "part0/0.txt" not in read[read.index(read[-1]) - 40 :]


@pytest.mark.parametrize("change", ["text", "tokenizer", "half-written progress", "a file lost"])
def test_what_was_killed_is_started_over_where_it_cannot_go_on(
    local: Local, text_folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr("depthlm.data.encode.BATCH", 200)
    data = local(shard_tokens=500, path="tokens")
    monkeypatch.setattr(sys.modules["depthlm.data.prepare"], "encode", lambda *given: encode(*given) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(data)
    monkeypatch.setattr(sys.modules["depthlm.data.prepare"], "encode", encode)
    if change == "text":
        (text_folder / "new.txt").write_text("more text " * 30)
    elif change == "tokenizer":
        data = local(shard_tokens=500, path="tokens", vocab_size=310)
    elif change == "half-written progress":
        progress = Path("tokens.partial/progress.json")
        progress.write_text(progress.read_text()[:100])
    else:
        Path("tokens.partial/train-00000.bin").unlink()
    expected = content(prepare(dataclasses.replace(data, path="alone"))["local"])
    assert content(prepare(data)["local"]) == expected


def test_two_processes_at_once_prepare_once(local: Local, text_folder: Path) -> None:
    processes = [ready(text_folder) for _ in range(2)]
    for process in processes:
        go(process)
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("prepared" in output for output in outputs) == 1
    data = local(shard_tokens=500)
    alone = prepare(local(path="alone", shard_tokens=500))["local"]
    assert open_corpus(data).manifests["local"] == Manifest.read(alone)


def test_what_changes_the_bytes_changes_the_folder_and_nothing_else_does(local: Local, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    changes = [
        {}, {"tokenizer": "bytes"}, {"vocab_size": 400}, {"validation_fraction": 0.1}, {"suffixes": [".txt"]},
        {"source": str(tmp_path / "copy")}, {"name": "other"}, {"max_tokens": 5}, {"shard_tokens": 7},
        {"files": "*0.txt"}, {"validation_files": "*0.txt"}, {"text_field": "body"},
    ]  # fmt: skip
    folders = [next(iter(token_folders(local(**change)).values())) for change in changes]
    assert len(set(folders)) == len(changes)
    silent = [
        {"num_workers": 4}, {"fraction": 0.5}, {"pad_vocab_multiple": 1}, {"source": "text"}, {"shuffle_seed": 3},
        {"document_mask": True}, {"on_bad_document": "skip"}, {"text_bytes": 5},
    ]  # fmt: skip
    for same in silent:
        assert token_folders(local(**same)) == token_folders(local())
    assert token_folders(local(tokenizer="bytes", vocab_size=999)) == token_folders(local(tokenizer="bytes"))


def test_token_files_at_a_path_are_used_as_they_are(local: Local) -> None:
    prepare(local(path="tokens", vocab_size=5000))
    bare = Data(name="pile", path="tokens")
    assert prepare(bare) == {"pile": Path("tokens")}
    assert list(open_corpus(bare).validation) == ["local"]
    # the text is too short for 5000 tokens; the answer must be that from before the tokens were made
    assert open_corpus(bare).tokenizer.vocab_size < 5000 == vocab_size(bare)
    with pytest.raises(DataError, match="vocab_size: 5000 there, 300 asked"):
        prepare(local(path="tokens"))


def test_text_that_changed_since_is_said(local: Local, text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(local())["local"]
    before = content(folder)
    (text_folder / "new.txt").write_text("new")
    prepare(local())
    assert "has changed since" in capsys.readouterr().err
    assert content(folder) == before


def test_a_document_longer_than_a_file_and_than_what_is_encoded_at_once_is_one_document(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(local(tokenizer="bytes", path="whole"))["local"]
    monkeypatch.setattr("depthlm.data.encode.LONGEST", 7)
    monkeypatch.setattr("depthlm.data.encode.BATCH", 20)
    cut = prepare(local(tokenizer="bytes", path="cut", shard_tokens=50))["local"]
    parts = [content(cut)[shard.name] for shard in Manifest.read(cut).train.files]
    assert len(parts[0]) == 2 * 50
    assert b"".join(parts) == content(whole)["train-00000.bin"]
    assert Manifest.read(cut).train.documents == Manifest.read(whole).train.documents


def test_a_folder_with_other_files_is_not_touched(local: Local) -> None:
    Path("precious").mkdir()
    Path("precious/thesis.tex").write_text("years")
    with pytest.raises(DataError, match="empty folder"):
        prepare(local(path="precious"))
    assert content(Path("precious")) == {"thesis.tex": b"years"}


def test_a_few_documents_still_have_one_held_out(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    for name in "abcdefgh":
        (tmp_path / "few" / f"{name}.txt").write_text(name * 100)
    manifest = Manifest.read(prepare(Data(name="local", source="few", validation_fraction=0.001))["local"])
    assert (manifest.train.documents, manifest.validation["local"].documents) == (7, 1)


def test_a_short_file_is_cut_into_enough_documents(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a line of text\n" * 200)
    manifest = Manifest.read(prepare(Data(name="local", source="short.txt", tokenizer="bytes"))["local"])
    assert manifest.train.documents > 20
    assert manifest.validation["local"].documents >= 1


def test_empty_text_or_a_single_document_is_refused_and_leaves_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data = Data(name="local", source="text", on_bad_document="skip")
    folder = token_folders(data)["local"]
    for content_of_file, words in ((b"", "1 empty documents"), (b"\xff", "not UTF-8"), (b"one", "more documents")):
        (tmp_path / "text" / "a.txt").write_bytes(content_of_file)
        with pytest.raises(DataError, match=words):
            prepare(data)
        assert not folder.exists()


def test_a_held_out_split_of_the_corpus_is_its_validation_set_and_nothing_else_is_held_out(tmp_path: Path) -> None:
    for name, texts in {"train": ["one two", "three"], "val": ["four"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = Data(
        name="own", source=".", files="train*", validation_files="val*", tokenizer="bytes", validation_fraction=0.5
    )
    prepare(data)
    corpus = open_corpus(data)
    read = {"train": corpus.train["own"], "validation": corpus.validation["own"]}
    texts = {name: corpus.tokenizer.decode(tokens.read(0, len(tokens))) for name, tokens in read.items()}
    assert texts == {"train": "one two<|endoftext|>three<|endoftext|>", "validation": "four<|endoftext|>"}


def test_each_source_of_a_mixture_gets_its_share_of_max_tokens_and_further_sets_are_held_out_whole(
    local: Local, text_folder: Path, tmp_path: Path
) -> None:
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
    # what the weights do not change is not prepared anew
    again = dataclasses.replace(data, max_tokens=None)
    first = prepare(again)
    again.sources["low"].weight = 7
    assert prepare(again) == first


def test_sources_made_with_different_tokenizers_do_not_mix(local: Local) -> None:
    prepare(local(path="one"))
    prepare(local(path="two", tokenizer="bytes"))
    data = Data(name="mix", sources={"a": Source(path="one", weight=1), "b": Source(path="two", weight=1)})
    with pytest.raises(DataError, match=r"another tokenizer.*two"):
        open_corpus(data)


BAD = {
    "empty": (b"", "empty"),
    "not UTF-8": (b"caf\xe9", "utf8"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_document_is_named_or_left_out_and_counted_as_the_configuration_says(
    local: Local, text_folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = content(prepare(local(path="clean"))["local"])
    bad, reason = BAD[kind]
    (text_folder / "zz.txt").write_bytes(bad)
    if reason != "empty":
        with pytest.raises(DataError, match="not UTF-8") as caught:
            prepare(local(path="tokens"))
        assert str(text_folder / "zz.txt") in str(caught.value)
        assert "data.on_bad_document=skip" in caught.value.remedy
        assert not Path("tokens").exists()
    folder = prepare(local(path="tokens", on_bad_document="skip"))["local"]
    assert f"left out 1 {REASONS[reason]}" in capsys.readouterr().err
    assert Manifest.read(folder).left_out == {reason: 1}
    kept = content(folder)
    assert {name: kept[name] for name in kept if name != "manifest.json"} == {
        name: clean[name] for name in clean if name != "manifest.json"
    }


def test_after_a_bad_line_the_rest_is_prepared_from_the_last_whole_file(
    local: Local, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("depthlm.data.encode.BATCH", 100)
    lines = [json.dumps({"text": f"document {n} " * 9}) for n in range(200)]
    lines[150] = lines[150][:-5]
    Path("a.jsonl").write_text("\n".join(lines))
    data = local(source="a.jsonl", tokenizer="bytes", shard_tokens=1000)
    with pytest.raises(DataError, match=r"line 151 is not JSON.*a\.jsonl"):
        prepare(data)
    prepare(dataclasses.replace(data, on_bad_document="skip"))
    assert "going on with" in capsys.readouterr().err
    manifest = Manifest.read(token_folders(data)["local"])
    assert manifest.train.documents + manifest.validation["local"].documents == 199
    assert manifest.left_out == {"json": 1}


def test_a_full_disk_is_said_and_what_was_written_is_gone_on_from(
    local: Local, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("depthlm.data.encode.BATCH", 200)
    data = local(shard_tokens=500, path="tokens")
    whole = content(prepare(local(shard_tokens=500, path="whole"))["local"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the kernel refuses the write, as it does on a full disk
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from depthlm.config.schema import Data
from depthlm.data import DataError, encode, prepare
from depthlm.data import split_writer
encode.BATCH = 200
write = split_writer.SplitWriter._write
def full(self, content):
    if len(self.shards) == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, {limits[1]}))
    write(self, content)
split_writer.SplitWriter._write = full
try:
    prepare(Data(name="local", source={data.source!r}, vocab_size=300, validation_fraction=0.2, shard_tokens=500,
                 path="tokens"))
except DataError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "cannot prepare token files" in done.stdout
    assert "File too large" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert not Path("tokens").exists()
    capsys.readouterr()
    assert content(prepare(data)["local"]) == whole
    assert "going on with" in capsys.readouterr().err


def test_too_little_room_is_said_before_anything_is_written(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(DataError, match=r"will take about .*, and 10 bytes are free"):
        prepare(local())
    assert left_over(token_folders(local())["local"]) == set()


def test_a_folder_that_cannot_be_written_is_said(local: Local) -> None:
    Path("file").write_text("")
    with pytest.raises(DataError, match="cannot prepare token files"):
        prepare(local(path="file/tokens"))
