import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.config.schema import Data
from depthlm.data import DataError, documents, is_validation
from depthlm.data.corpora import PIECE, describe


def test_a_folder_gives_its_files_in_sorted_order_whatever_the_order_they_were_made_in(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.md", "a.txt", "c.bin", "b-a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = list(documents(Data(source=str(tmp_path))))
    assert found == [(name, name) for name in ("a.txt", "b-a.txt", "b/a.md", "b/z.txt")]


def test_hidden_empty_and_undecodable_files_are_left_out_and_newlines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    for hidden in (".git", "__pycache__"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "a.txt").write_text("no")
    (tmp_path / "good.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert list(documents(Data(source=str(tmp_path)))) == [("good.txt", "\ufeffa\r\nb\rc\n")]


@pytest.mark.parametrize("line", ["a line of text\r\n", "é", "\n", "x" * 3 * PIECE + "\n"])
def test_one_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path, line: str) -> None:
    file = tmp_path / "book"
    text = line * (40 * PIECE // len(line) + 1)
    file.write_bytes(text.encode())
    found = list(documents(Data(source=str(file))))
    assert "".join(piece for _, piece in found) == text
    assert [name for name, _ in found] == sorted({name for name, _ in found})
    assert all(PIECE <= len(piece) <= 2 * PIECE for _, piece in found[:-1])
    if len(line) < PIECE and line.endswith("\n"):
        assert all(piece.endswith("\n") for _, piece in found)


def test_the_standard_library_is_a_corpus() -> None:
    data = Data(name="stdlib")
    names = [name for name, _ in documents(data)]
    assert "argparse.py" in names
    assert names == sorted(names)
    assert len(names) > 300
    assert not any("site-packages" in name for name in names)
    assert describe(data)["python"] == platform.python_version()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Data(source="nowhere"), "no such folder or file: nowhere"),
        (Data(source="."), "no file ending in .txt, .md, .py"),
        (Data(name="pile"), "Set data.source"),
    ],
)
def test_text_that_is_not_there_is_said_so(data: Data, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(documents(data))


def test_a_single_file_that_is_not_utf8_is_refused() -> None:
    Path("latin1.txt").write_bytes(b"caf\xe9 noir")
    with pytest.raises(DataError, match="not UTF-8"):
        list(documents(Data(source="latin1.txt")))


@given(st.text(st.characters(codec="utf-8")), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_document_held_out_stays_held_out_at_a_larger_share(name: str, one: float, other: float) -> None:
    assert is_validation(name, min(one, other)) <= is_validation(name, max(one, other))
    assert not is_validation(name, 0)
    assert is_validation(name, 1)


def test_the_share_held_out_is_the_fraction_asked_for() -> None:
    held = sum(is_validation(f"{i}.txt", 0.05) for i in range(20_000))
    assert abs(held / 20_000 - 0.05) < 0.006
    # pinned: another hash would move documents between the splits of prepared token files
    assert [i for i in range(100) if is_validation(f"{i}.txt", 0.05)] == [68, 71, 79]
