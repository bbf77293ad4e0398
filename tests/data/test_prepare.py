import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from depthlm.config.schema import Data
from depthlm.data import DataError, Manifest, open_corpus, prepare, token_folder, vocab_size

Local = Callable[..., Data]

# Preparing once told to, slowed down, so that a kill can fall into any part of it.
SLOW = """
import sys, time
from depthlm.config.schema import Data
from depthlm.data import encode, prepare
from depthlm.data.token_files import SplitWriter
encode.BATCH = 200
add = SplitWriter.add
SplitWriter.add = lambda *given: (time.sleep(0.01), add(*given))
print("ready", flush=True)
sys.stdin.readline()
prepare(Data(name="local", source=sys.argv[1], vocab_size=300, validation_fraction=0.2))
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


def test_preparing_again_does_nothing(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(local())
    assert "prepared" in capsys.readouterr().err
    times = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert prepare(local()) == folder
    assert times == {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert capsys.readouterr().err == ""


def test_the_same_text_and_settings_give_the_same_bytes(local: Local, tmp_path: Path) -> None:
    first, second = prepare(local(), progress=False), prepare(local(path="elsewhere/tokens"), progress=False)
    assert second == Path("elsewhere/tokens")
    assert content(first) == content(second)


def test_killed_at_any_moment_the_next_call_gives_the_same_bytes(local: Local, text_folder: Path) -> None:
    folder = token_folder(local())
    whole = content(prepare(local(path="whole")))
    chance = random.Random(0)
    left_over = 0
    for _ in range(5):
        process = ready(text_folder)
        go(process)
        time.sleep(chance.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left_over += folder.parent.exists() and any(".tmp-" in path.name for path in folder.parent.iterdir())
    assert left_over
    prepare(local())
    assert content(folder) == whole
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_two_processes_at_once_prepare_once(local: Local, text_folder: Path) -> None:
    processes = [ready(text_folder) for _ in range(2)]
    for process in processes:
        go(process)
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("prepared" in output for output in outputs) == 1
    assert open_corpus(local()).manifest == Manifest.read(prepare(local(path="alone")))


def test_what_changes_the_bytes_changes_the_folder_and_nothing_else_does(local: Local, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    changes = [
        {}, {"tokenizer": "bytes"}, {"vocab_size": 400}, {"validation_fraction": 0.1}, {"suffixes": [".txt"]},
        {"source": str(tmp_path / "copy")}, {"name": "other"},
    ]  # fmt: skip
    assert len({token_folder(local(**change)) for change in changes}) == len(changes)
    for same in ({"num_workers": 4}, {"max_tokens": 5}, {"pad_vocab_multiple": 1}, {"source": "text"}):
        assert token_folder(local(**same)) == token_folder(local())
    assert token_folder(local(tokenizer="bytes", vocab_size=999)) == token_folder(local(tokenizer="bytes"))


def test_token_files_at_a_path_are_used_as_they_are(local: Local) -> None:
    prepare(local(path="tokens", vocab_size=5000))
    bare = Data(name="pile", path="tokens")
    assert prepare(bare) == Path("tokens")
    assert list(open_corpus(bare).validation) == ["local"]
    # the text is too short for 5000 tokens; the answer must be that from before the tokens were made
    assert open_corpus(bare).tokenizer.vocab_size < 5000 == vocab_size(bare)
    with pytest.raises(DataError, match="vocab_size: 5000 there, 300 asked"):
        prepare(local(path="tokens"))


def test_text_that_changed_since_is_said(local: Local, text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(local())
    before = content(folder)
    (text_folder / "new.txt").write_text("new")
    prepare(local())
    assert "has changed since" in capsys.readouterr().err
    assert content(folder) == before


def test_a_document_longer_than_what_is_encoded_at_once_is_one_document(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(prepare(local(tokenizer="bytes", path="whole")))
    monkeypatch.setattr("depthlm.data.encode.LONGEST", 7)
    assert content(prepare(local(tokenizer="bytes", path="cut"))) == whole


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
    manifest = Manifest.read(prepare(Data(name="local", source="few", validation_fraction=0.001)))
    assert (manifest.train.documents, manifest.validation["local"].documents) == (7, 1)


def test_a_short_file_is_cut_into_enough_documents(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a line of text\n" * 200)
    manifest = Manifest.read(prepare(Data(name="local", source="short.txt", tokenizer="bytes")))
    assert manifest.train.documents > 20
    assert manifest.validation["local"].documents >= 1


def test_empty_text_or_a_single_document_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data = Data(name="local", source="text")
    for content_of_file, words in ((b"", "every file is empty"), (b"\xff", "not UTF-8"), (b"one", "more documents")):
        (tmp_path / "text" / "a.txt").write_bytes(content_of_file)
        with pytest.raises(DataError, match=words):
            prepare(data)
        assert not token_folder(data).exists()
        assert [path.name for path in token_folder(data).parent.iterdir()] == [f".{token_folder(data).name}.lock"]


def test_a_folder_that_cannot_be_written_is_said(local: Local) -> None:
    Path("file").write_text("")
    with pytest.raises(DataError, match="cannot prepare token files"):
        prepare(local(path="file/tokens"))
