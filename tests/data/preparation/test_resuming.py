"""Preparing resumes after a kill, and gives the bytes of an uninterrupted preparation."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthlm.data import DataError, Manifest, prepare
from depthlm.data.corpora.documents import Reader
from depthlm.data.corpora.formats import TextFile
from depthlm.data.preparation.progress import ProgressFile, SplitWriter
from depthlm.data.settings import Data

from .preparing import content


def stopped_after(monkeypatch: pytest.MonkeyPatch, saves: int, data: Data) -> None:
    """Prepare until progress has been saved `saves` times, then stop as if killed."""
    save, count = ProgressFile.save, iter(range(saves))

    def counted(self: ProgressFile, *arguments: Any) -> None:
        save(self, *arguments)
        if next(count) == saves - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressFile, "save", counted)
        with pytest.raises(KeyboardInterrupt):
            prepare(data)


def test_a_killed_preparation_resumes_from_its_last_complete_file(local, monkeypatch, capsys):
    data = local(shard_tokens=500)
    whole = content(prepare(local(path="whole", shard_tokens=500))["local"])
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    stopped_after(monkeypatch, 3, data)
    read = []
    lines = Reader.records
    monkeypatch.setattr(Reader, "records", lambda self, first=0: read.append(self.file.name) or lines(self, first))
    capsys.readouterr()
    assert content(prepare(data)["local"]) == whole
    assert "resuming /" in capsys.readouterr().err
    assert read[-1] == "part2/8.txt"
    assert "part0/0.txt" not in read[read.index(read[-1]) - 40 :]


@pytest.mark.parametrize("change", ["text", "half-written progress", "a file lost"])
def test_a_killed_preparation_that_cannot_resume_starts_from_scratch(local, text_folder, monkeypatch, capsys, change):
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    data = local(shard_tokens=500, path="tokens")
    stopped_after(monkeypatch, 4, data)
    if change == "text":
        (text_folder / "part0" / "0.txt").rename(text_folder / "part2" / "zz.txt")
    elif change == "half-written progress":
        progress = Path("tokens.partial/progress.json")
        progress.write_text(progress.read_text()[:100])
    else:
        Path("tokens.partial/train-00000.bin").unlink()
    expected = content(prepare(dataclasses.replace(data, path="alone"))["local"])
    capsys.readouterr()
    assert content(prepare(data)["local"]) == expected
    assert ("from scratch: its text has changed" in capsys.readouterr().err) == (change == "text")


def test_a_kill_inside_a_document_that_spans_files_does_not_cut_it(local, text_folder, monkeypatch):
    monkeypatch.setattr("depthlm.data.preparation.encode.LONGEST", 50)
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 60)
    (text_folder / "part1" / "long.txt").write_text("a long document " * 500)
    data = local(tokenizer="bytes", shard_tokens=300)
    whole = content(prepare(local(tokenizer="bytes", shard_tokens=300, path="whole"))["local"])
    for saves in (1, 3, 2):
        stopped_after(monkeypatch, saves, data)
    assert content(prepare(data)["local"]) == whole


def test_with_another_setting_an_unfinished_preparation_is_refused_and_stays_as_it_is(local, monkeypatch):
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    data = local(shard_tokens=500, path="tokens")
    stopped_after(monkeypatch, 3, data)
    before = tree(Path("tokens.partial"))
    assert len(before) > 3
    with pytest.raises(DataError, match=r"vocab_size: prepared 300, requested 310") as caught:
        prepare(dataclasses.replace(data, vocab_size=310))
    assert "Set another data.path, or remove this folder by hand" in caught.value.remedy
    assert tree(Path("tokens.partial")) == before
    prepare(data)
    assert content(Path("tokens")) == content(prepare(local(shard_tokens=500, path="whole"))["local"])


@pytest.mark.parametrize("name", ["manifest.json", "notes/a.txt"])
def test_a_folder_of_the_user_in_the_way_is_not_touched(local, name):
    Path("thesis.partial", name).parent.mkdir(parents=True)
    Path("thesis.partial", name).write_text('{"text": "years"}')
    Path(".thesis.lock").write_text("mine")
    with pytest.raises(DataError, match=r"in the way of preparing.*thesis\.partial.*Set another data\.path"):
        prepare(local(path="thesis"))
    assert tree(Path("thesis.partial")) == {name: b'{"text": "years"}'}
    assert Path(".thesis.lock").read_text() == "mine"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_flipped_bit_in_the_file_that_was_open_is_an_error(local, monkeypatch):
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    data = local(shard_tokens=500, path="tokens")
    stopped_after(monkeypatch, 2, data)
    unfinished = max(Path("tokens.partial").glob("train-*.bin"))
    damaged = bytearray(unfinished.read_bytes())
    damaged[0] ^= 1
    unfinished.write_bytes(damaged)
    with pytest.raises(DataError, match=rf"{unfinished.name} is damaged.*tokens\.partial. Check the disk"):
        prepare(data)
    damaged[0] ^= 1
    unfinished.write_bytes(damaged)
    assert content(prepare(data)["local"]) == content(prepare(local(shard_tokens=500, path="whole"))["local"])


def test_a_preparation_resumes_with_files_that_were_copied_which_is_noted_and_counts_what_was_skipped(
    local, text_folder, monkeypatch, capsys
):
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    (text_folder / "aa.txt").write_bytes(b"")
    data = local(shard_tokens=500, path="tokens")
    stopped_after(monkeypatch, 3, data)
    text_folder.rename("original")
    shutil.copytree("original", text_folder)
    for _ in range(2):
        capsys.readouterr()
        prepare(data)
        assert "may have changed" in capsys.readouterr().err
    whole = content(prepare(local(path="whole", shard_tokens=500))["local"])
    assert content(Path("tokens"))["train-00000.bin"] == whole["train-00000.bin"]
    assert Manifest.read(Path("tokens")).left_out == {"empty": 1}


def test_a_hub_corpus_resumes_at_the_commit_it_started_with(local, text_folder, monkeypatch):
    lines = [json.dumps({"text": f"document {n} " * 9}) for n in range(200)]
    Path("a.jsonl").write_text("\n".join(lines))
    asked: list[str | None] = []

    def hub_files(repo: str, subset: str | None, revision: str | None, splits: list[str]) -> tuple[str, dict[str, Any]]:
        asked.append(revision)
        return revision or f"commit-{len(asked)}", {split: [TextFile("a.jsonl", "a.jsonl")] for split in splits}

    monkeypatch.setattr("depthlm.data.corpora.hub.hub_files", hub_files)
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 100)
    data = Data(name="own", hub="some/corpus", tokenizer="bytes", shard_tokens=1000, validation_fraction=0.2)
    stopped_after(monkeypatch, 2, data)
    folder = prepare(data)["own"]
    assert asked == [None, "commit-1"]
    assert Manifest.read(folder).source["revision"] == "commit-1"


def test_preparing_resumes_after_a_full_disk(local, monkeypatch):
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 200)
    data = local(shard_tokens=500, path="tokens")
    write = SplitWriter._write

    def fill(self: SplitWriter, content: Any) -> None:
        if len(self.shards) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "_write", fill)
        with pytest.raises(DataError, match=r"cannot prepare token files .*No space left on device"):
            prepare(data)
    assert not Path("tokens").exists()
    assert content(prepare(data)["local"]) == content(prepare(local(shard_tokens=500, path="whole"))["local"])
