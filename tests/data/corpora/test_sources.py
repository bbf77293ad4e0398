import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

import depthlm
from depthlm.config import ConfigError
from depthlm.data import (
    DataError,
    TokenFiles,
    open_corpus,
    prepare,
    train_sources,
    validation_sources,
)
from depthlm.data.corpora.documents import PIECE, documents
from depthlm.data.corpora.sources import text_files
from depthlm.data.settings import Data, Source


def docs(data: Data) -> Iterator[tuple[str, str]]:
    cut = data.source is not None and Path(data.source).is_file()
    return documents(text_files(data.name, data).train, data.text_field or "", cut)


def test_a_folder_gives_its_visible_files_in_sorted_order_with_their_newlines(tmp_path):
    names = ["LICENSE.txt", "README.md", "a.txt", "b-a.txt", "b/a.md", "b/z.txt"]
    write(tmp_path, *reversed(names), "c.bin", "package.json", ".git/a.txt", "__pycache__/a.txt")
    assert list(docs(Data(source=str(tmp_path)))) == [(name, name) for name in names]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert list(docs(Data(source=str(tmp_path))))[2] == ("a.txt", "\ufeffa\r\nb\rc\n")


@pytest.mark.parametrize("line", ["a line of text\r\n", "é", "x" * 3 * PIECE + "\n"])
def test_one_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, line):
    file = tmp_path / "book"
    text = line * (40 * PIECE // len(line) + 1)
    file.write_bytes(text.encode())
    pieces = list(docs(Data(source=str(file))))
    assert "".join(piece for _, piece in pieces) == text
    assert [name for name, _ in pieces] == sorted({name for name, _ in pieces})
    assert all(PIECE <= len(piece) <= 2 * PIECE for _, piece in pieces[:-1])
    if len(line) < PIECE and line.endswith("\n"):
        assert all(piece.endswith("\n") for _, piece in pieces)


def test_the_standard_library_is_a_corpus():
    files = text_files("stdlib", Data(name="stdlib"))
    names = [file.name for file in files.train]
    assert "argparse.py" in names
    assert names == sorted(names)
    assert len(names) > 300
    assert not any("site-packages" in name for name in names)
    assert files.description["python"] == platform.python_version()


def test_patterns_select_the_files_of_a_mirror_to_read_and_to_hold_out(tmp_path):
    for name in ("train/00.jsonl", "train/01.jsonl", "val.jsonl", "test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    files = text_files("pile", Data(source=str(tmp_path), files="*train/*", validation_files="*val.*"))
    assert [file.name for file in files.train] == ["train/00.jsonl", "train/01.jsonl"]
    assert files.held_out is not None
    assert [file.name for file in files.held_out] == ["val.jsonl"]
    with pytest.raises(DataError, match=r"data\.validation_files=\*dev\*"):
        text_files("pile", Data(source=str(tmp_path), validation_files="*dev*"))
    both = Data(name="pile", source=str(tmp_path), files="*pain/*", validation_files="*dev*")
    with pytest.raises(DataError, match=r"data\.files=\*pain/\* and data\.validation_files=\*dev.*test\.jsonl"):
        text_files("pile", both)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a/**/*.jsonl", ["a/b/three.jsonl", "a/two.jsonl"]),
        ("a/*.jsonl", ["a/b/three.jsonl", "a/two.jsonl"]),
        ("**/b/**/three.*", ["a/b/three.jsonl"]),
    ],
)
def test_folders_in_a_pattern_may_be_none(tmp_path, pattern, names):
    write(tmp_path, "one.jsonl", "a/two.jsonl", "a/b/three.jsonl", "a/b/four.txt")
    files = text_files("own", Data(source=str(tmp_path), files=pattern))
    assert [file.name for file in files.train] == names
    assert files.unread == (f"files that data.files does not match: {4 - len(names)} ({rest(tmp_path, names)})",)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def rest(folder: Path, names: list[str]) -> str:
    others = sorted({str(file.relative_to(folder)) for file in folder.rglob("*.*")} - {*names})
    return ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")


def test_what_a_folder_holds_and_is_not_read_is_named(tmp_path, capsys):
    texts = [*(f"{n}.txt" for n in range(30)), "UP.TXT", "_mine.txt"]
    write(tmp_path, *texts, "data/a.json", "b.Json.gz", "LICENSE", ".hidden.txt", "c.bin")
    write(tmp_path, "_temporary/0/part-1.txt", "_SUCCESS", "sub/__MACOSX/a.txt", "x/__pycache__/a.txt")
    for number in range(5):
        (tmp_path / f"link{number}.txt").symlink_to(f"../blobs/{number}")
    os.mkfifo(tmp_path / "pipe.txt")
    data = Data(name="own", source=str(tmp_path), suffixes=[".txt"], tokenizer="bytes")
    files = text_files("own", data)
    assert [file.name for file in files.train] == sorted(texts)
    expected = (
        "dangling links: 5 (link0.txt, link1.txt, link2.txt, ...)",
        "entries that are not regular files: 1 (pipe.txt)",
        "files and folders of other tools: 3 (_SUCCESS, _temporary, sub/__MACOSX)",
        "files ending in .bin: 1 (c.bin)",
        "files ending in .json: 1 (data/a.json)",
        "files ending in .json.gz: 1 (b.Json.gz)",
        "files without a suffix: 1 (LICENSE)",
        "folders of packages: 1 (x/__pycache__)",
        "hidden files and folders: 1 (.hidden.txt)",
    )
    assert files.unread == expected
    prepare(data)
    assert capsys.readouterr().err.splitlines()[:6] == [f"not read in {tmp_path}: {line}" for line in expected[:6]]


def test_the_card_and_licence_of_a_downloaded_data_set_are_not_text(tmp_path):
    read, about = ["data/README.md", "data/train.txt"], ["LICENSE.txt", "README.md", "dataset_infos.json", "script.py"]
    write(tmp_path, *read, *about, ".gitattributes")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---")
    files = text_files("own", Data(source=str(tmp_path)))
    assert [file.name for file in files.train] == read
    assert files.unread == (
        f"files about the data set: 4 ({rest(tmp_path, [*read, '.gitattributes'])})",
        "hidden files and folders: 1 (.gitattributes)",
    )


def test_a_source_of_a_mixture_takes_missing_settings_from_the_corpus():
    data = Data(
        name="mix", hub="a/b", text_field="body", path="tokens", weight=9,
        sources={"one": Source(subset="x", weight=2), "two": Source(source="here", weight=1, text_field="text")},
        validation={"held": Source(source="there")},
    )  # fmt: skip
    one, two = train_sources(data).values()
    assert (one.hub, one.subset, one.text_field, one.split, one.weight) == ("a/b", "x", "body", "train", 2)
    assert (two.source, two.text_field, two.weight) == ("here", "text", 1)
    assert (one.path, two.path) == (str(Path("tokens/one")), str(Path("tokens/two")))
    held = validation_sources(data)["held"]
    assert (held.hub, held.path, held.split, held.text_field) == (None, None, "validation", "body")


def test_missing_text_is_an_error():
    for data, message in (
        (Data(source="nowhere"), "no such folder or file: nowhere"),
        (Data(source="."), "no file ending in .txt, .md, .py"),
        (Data(name="own"), "Set data.source"),
    ):
        with pytest.raises(DataError, match=message):
            list(docs(data))


def test_linked_folders_are_read_once_and_unusual_names_are_read(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "mirror").mkdir()
    (tmp_path / "real" / "a b\nc.txt").write_text("one")
    (tmp_path / "real" / "\udcff.txt").write_text("two")
    (tmp_path / "mirror" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "real")
    assert sorted(text for _, text in docs(Data(source=str(tmp_path / "mirror"), tokenizer="bytes"))) == ["one", "two"]
    prepare(Data(name="own", source=str(tmp_path / "mirror"), tokenizer="bytes"))


@pytest.mark.parametrize(
    ("link", "target"),
    [("2023", "2024"), ("0.txt", "2024/0.txt")],
)
def test_what_a_link_leads_to_below_the_source_is_read_once_by_its_own_name(tmp_path, link, target):
    write(tmp_path, "2024/0.txt", "2024/1.txt")
    (tmp_path / link).symlink_to(tmp_path / target)
    files = text_files("own", Data(source=str(tmp_path)))
    assert [file.name for file in files.train] == ["2024/0.txt", "2024/1.txt"]
    assert files.unread == (f"links to what is read already: 1 ({link})",)


@pytest.mark.parametrize("pattern", [None, "held*"])
def test_no_held_out_document_is_trained_on(tmp_path, pattern):
    texts = [f"document {number} is unique" for number in range(60)]
    for folder in ("src/a", "src/b"):
        (tmp_path / folder).mkdir(parents=True)
        for number, text in enumerate(texts):
            (tmp_path / folder / f"{folder[-1]}{number}.txt").write_text(text)
    if pattern is not None:
        (tmp_path / "src/held.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts[:7]))
    data = Data(
        name="own", source=str(tmp_path / "src"), tokenizer="bytes", path=str(tmp_path / "tokens"),
        validation_fraction=0.2, validation_files=pattern, suffixes=[".txt", ".jsonl"],
    )  # fmt: skip
    prepare(data)
    corpus = open_corpus(data)
    train, held_out = (
        [corpus.tokenizer.decode(part) for part in _documents(tokens, corpus.tokenizer.end_of_text)]
        for tokens in (corpus.train["own"], corpus.validation["own"])
    )
    assert {*train}.isdisjoint(held_out)
    assert sorted({*train} | {*held_out}) == sorted(texts)
    if pattern is not None:
        assert (held_out, len(train)) == (texts[:7], 2 * 53)
        assert corpus.manifests["own"].left_out == {"held_out": 14}
    else:
        # copies are in one split
        assert all(split.count(text) == 2 for split in (train, held_out) for text in split)
        assert 4 <= len({*held_out}) <= 22


def _documents(tokens: TokenFiles, end: int) -> list[list[int]]:
    ids = tokens.read(0, len(tokens)).tolist()
    ends = [place for place, number in enumerate(ids) if number == end]
    return [ids[start:stop] for start, stop in zip([0, *(stop + 1 for stop in ends)], ends, strict=False)]


def test_token_files_outlive_their_text(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number}")
    overrides = ["data=local", "data.source=text", "data.tokenizer=bytes"]
    prepare(depthlm.compose(overrides).data)
    (tmp_path / "text").rename(tmp_path / "gone")
    data = depthlm.compose(overrides).data
    prepare(data)
    assert open_corpus(data).tokens > 100
    with pytest.raises(ConfigError, match="no such folder or file"):
        depthlm.compose([*overrides, "data.validation_fraction=0.2"])
