import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from depthlm.data import DataError
from depthlm.data.corpora.documents import LONGEST, Reader, Record, documents, held_out_share, is_validation
from depthlm.data.corpora.formats import TextFile

TEXTS = ["one", "two\nlines \u2028 and é", "🙂 three", "four <|endoftext|>"]
LINES = b"".join(json.dumps({"meta": {"n": n}, "text": text}).encode() + b"\n" for n, text in enumerate(TEXTS))
FRACTIONS = st.floats(0, 0.5)


def packed(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def long_window(content: bytes) -> bytes:
    """Return a frame whose header announces a window of 2 GiB, as `zstd --long=31` writes it for a pipe."""
    options = {zstd.CompressionParameter.window_log: 31, zstd.CompressionParameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    return compressor.compress(content) + compressor.flush()


def parquet(path: Path, **columns: list[object]) -> None:
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=2)


def records(
    path: Path, first: int = 0, text_field: str = "text", cut: bool = False, longest: int = LONGEST
) -> list[Record]:
    return list(Reader(TextFile(path.name, str(path)), text_field, cut, longest).records(first))


FORMATS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "no-last-newline.json": lambda path: path.write_bytes(LINES.rstrip()),
    "blank-lines.jsonl": lambda path: path.write_bytes(LINES + b"\n \n"),
    "A.JSON.GZ": lambda path: path.write_bytes(gzip.compress(LINES)),
    "two-members.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES[:60]) + gzip.compress(LINES[60:])),
    "a.jsonl.zst": lambda path: path.write_bytes(packed(LINES)),
    "two-frames.jsonl.zst": lambda path: path.write_bytes(packed(LINES[:60]) + packed(LINES[60:])),
    "A.PARQUET": lambda path: parquet(path, url=["", "", "", ""], text=TEXTS),
    "a.jl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "padded.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES) + bytes(5000)),
    "window.jsonl.zst": lambda path: path.write_bytes(long_window(LINES)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_its_texts_from_any_start_record(tmp_path, name):
    path = tmp_path / name
    FORMATS[name](path)
    all_records = records(path)
    assert [record.text for record in all_records] == TEXTS
    assert [record.next for record in all_records] == [1, 2, 3, 4]
    for first in range(5):
        assert records(path, first) == all_records[first:]
    assert list(documents([TextFile(name, str(path))], "text")) == [(r.name, r.text) for r in all_records]


def test_one_file_of_text_is_one_document_or_cut_into_many(tmp_path):
    path = tmp_path / "book.txt.gz"
    text = "".join(f"line {n}\n" for n in range(5000))
    path.write_bytes(gzip.compress(text.encode()))
    assert [record.text for record in records(path)] == [text]
    pieces = records(path, cut=True)
    assert "".join(record.text or "" for record in pieces) == text
    assert records(path, 3, cut=True) == pieces[3:]
    # a piece that is not UTF-8 is bad, and its neighbours are read
    path.write_bytes(gzip.compress(text.encode().replace(b"line 2500\n", b"line 25\xe9\xe9\n")))
    damaged = records(path, cut=True)
    (bad,) = [record for record in damaged if record.text is None]
    assert (bad.bad, bad.why) == ("utf8", f"piece {bad.next} of the file is not UTF-8 (surrogates not allowed)")
    assert [piece for piece in damaged if piece != bad] == [piece for piece in pieces if piece.name != bad.name]


OVER = "x" * 2000


@pytest.mark.parametrize("name", ["long.jsonl", "long.jsonl.gz", "long.jsonl.zst", "long.parquet", "long.txt.gz"])
def test_a_document_over_the_limit_is_bad_and_its_neighbours_are_read(tmp_path, name):
    path, texts = tmp_path / name, ["one", OVER, "three"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if name.endswith("parquet"):
        parquet(path, text=texts)
    elif name.endswith("txt.gz"):
        path.write_bytes(gzip.compress(OVER.encode()))
        texts = [OVER]
    else:
        path.write_bytes({"jsonl": bytes, "gz": gzip.compress, "zst": packed}[name.rpartition(".")[2]](lines))
    assert [record.text for record in records(path)] == texts
    limited = records(path, longest=1000)
    assert [record.text for record in limited] == [None if text == OVER else text for text in texts]
    (bad,) = [record for record in limited if record.text is None]
    assert bad.bad == "long"
    assert bad.why.endswith("is longer than data.max_document_bytes=1000")
    assert [record.next for record in limited] == [record.next for record in records(path)]
    exact = max(len(line) for line in lines.splitlines()) if "jsonl" in name else len(OVER)
    assert [record.text for record in records(path, longest=exact)] == texts


@pytest.mark.parametrize("pack", [gzip.compress, packed])
def test_a_long_document_is_not_decompressed_into_memory(tmp_path, pack):
    path = tmp_path / f"bomb.jsonl.{'gz' if pack is gzip.compress else 'zst'}"
    path.write_bytes(pack(b'{"text": "' + b"x" * 2**26 + b'"}\n' + LINES))
    tracemalloc.start()
    assert [record.text for record in records(path, longest=2**20)] == [None, *TEXTS]
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


BAD_LINES = {
    b'{"text": "half': ("json", "line 5 is not JSON"),
    b"[1]": ("json", "line 5 is not a JSON object"),
    b'{"url": "x", "date": 1}': ("field", "line 5: the field 'text' is missing; there are 'url', 'date'"),
    b'{"text": null}': ("field", "line 5: the field 'text' is not a string"),
    b'{"text": "caf\xe9"}': ("utf8", "line 5 is not UTF-8"),
    b'{"text": "half a pair \\ud83d"}': ("utf8", "line 5 is not UTF-8"),
    b'{"text": ""}': ("empty", "line 5 is empty"),
}


def test_bad_lines_are_reported_and_their_neighbours_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    for line, (reason, message) in BAD_LINES.items():
        path.write_bytes(LINES + line + b"\n" + LINES)
        all_records = records(path)
        assert [record.text for record in all_records] == [*TEXTS, None, *TEXTS]
        assert all_records[4].bad == reason
        assert message in all_records[4].why


def test_a_bad_row_is_reported_and_its_neighbours_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    values = pa.array([b"one", b"caf\xe9", None, b"", b"two"], pa.binary())
    # another writer may have stored unchecked bytes as text
    text = pa.Array.from_buffers(pa.string(), 5, values.buffers())
    pyarrow.parquet.write_table(pa.table({"text": text}), path)
    all_records = records(path)
    assert [record.text for record in all_records] == ["one", None, None, None, "two"]
    assert [record.bad for record in all_records] == ["", "utf8", "field", "empty", ""]
    assert all_records[1].why.startswith("row 2 is not UTF-8")


def test_every_type_of_text_column_is_read_and_another_type_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    for dtype in (pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        pyarrow.parquet.write_table(pa.table({"text": pa.array(TEXTS).cast(dtype)}), path)
        assert [record.text for record in records(path)] == TEXTS
    parquet(path, text=[[b"a"], [b"b"]])
    with pytest.raises(DataError, match="the column 'text' is of type"):
        records(path)


def test_a_column_that_is_missing_or_there_twice_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, body=TEXTS, url=TEXTS)
    with pytest.raises(DataError, match=r"no column 'text'.*body, url") as caught:
        records(path)
    assert str(path) in str(caught.value)
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pyarrow.parquet.write_table(pa.Table.from_arrays(columns, names=["text", "text", "url"]), path)
    with pytest.raises(DataError, match="2 columns are named 'text'"):
        records(path)
    # the field of a struct beside it has the same name
    parquet(path, meta=[{"text": "no"}] * 4, **{"meta.text": TEXTS})
    assert [record.text for record in records(path, text_field="meta.text")] == TEXTS


LONG = b"".join(json.dumps({"text": f"{n} {n * n}"}).encode() + b"\n" for n in range(3000))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl.zst", packed(LONG)[:-9]),
        ("second-frame-cut.jsonl.zst", packed(LONG) + packed(LONG)[:20]),
        ("other.jsonl.zst", b"no zstd at all"),
        ("empty.jsonl.zst", b""),
        ("cut.json.gz", gzip.compress(LONG)[:-100]),
        ("empty.json.gz", b""),
        ("cut.parquet", b"PAR1 and nothing more"),
    ],
)
def test_a_truncated_or_damaged_file_is_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        records(path)
    assert str(path) in str(caught.value)
    assert "again" in caught.value.remedy


NOT_LINES = {
    "utf16.jsonl": (LINES.decode().encode("utf-16"), "the file is UTF-16", "iconv -f UTF-16"),
    "array.json": (json.dumps([{"text": text} for text in TEXTS]).encode(), "one array of JSON", "jq -c '.[]'"),
    "object.json": (json.dumps({"text": "one"}, indent=1).encode(), "takes several lines", "jq -c ."),
    "gzip.jsonl": (gzip.compress(LINES), "compressed by gzip", "Add .gz to its name"),
}


@pytest.mark.parametrize("name", NOT_LINES)
def test_a_file_that_is_not_an_object_per_line_is_named_for_what_it_is(tmp_path, name):
    content, what, remedy = NOT_LINES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        records(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert remedy in caught.value.remedy


def test_a_value_that_a_small_parquet_file_repeats_takes_little_memory(tmp_path):
    path, value, count = tmp_path / "a.parquet", "x" * 2**21, 100
    table = pa.table({"text": [value] * count + TEXTS})
    pyarrow.parquet.write_table(table, path, compression="zstd", dictionary_pagesize_limit=2**30)
    assert path.stat().st_size < 2**16
    del table
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        read = records(path, longest=2**20)
    finally:
        pa.set_memory_pool(usual)
    assert [record.text for record in read] == [None] * count + TEXTS
    # all at once would be 200 MiB
    assert pool.max_memory() < 2**27
    assert records(path, count + 1, longest=2**20) == read[count + 1 :]


@given(st.text("ab.é🙂"), FRACTIONS, FRACTIONS)
def test_a_held_out_document_stays_held_out_at_a_larger_fraction(name, one, other):
    assert is_validation(name, min(one, other)) <= is_validation(name, max(one, other))
    assert not is_validation(name, 0)
    assert is_validation(name, 1)


def test_the_held_out_share_is_the_requested_fraction():
    held = sum(is_validation(f"{i}.txt", 0.05) for i in range(20_000))
    assert abs(held / 20_000 - 0.05) < 0.006
    # pinned: another hash would put documents of prepared token files into another split
    assert [i for i in range(100) if is_validation(f"{i}.txt", 0.05)] == [68, 71, 79]


@given(st.sets(st.text("ab.é🙂"), min_size=1, max_size=20), FRACTIONS)
def test_at_least_one_document_is_held_out(names, requested):
    fraction = held_out_share(names, requested)
    held = [name for name in names if is_validation(name, fraction)]
    assert fraction >= requested
    assert held == [name for name in names if is_validation(name, requested)] or len(held) == 1
