"""Documents read from files of text, JSON and parquet, and the values of a column that parquet files hold.

A document is a text file, a line of JSON or a row of parquet. Bad documents are reported. A hash of a document's text
decides whether it is held out, so copies of a document are in the same split.
"""

import codecs
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TextIO

from depthlm.data.corpora import formats
from depthlm.data.corpora.formats import TextFile
from depthlm.errors import DataError
from depthlm.files import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

# Where the source is a single text file, it is cut into documents of PIECE characters; a short file is cut into about
# PIECES documents, so that some can be held out.
PIECE = 8192
PIECES = 32
# The default of data.max_document_bytes.
LONGEST = 2**30
REASONS = {
    "empty": "empty documents",
    "utf8": "documents that are not UTF-8",
    "json": "lines that are not JSON objects",
    "field": "documents without a text",
    "long": "documents longer than data.max_document_bytes",
    "held_out": "documents that are also in the held-out files",
}
# Rows that are read at once; fewer where they have more than BATCH_BYTES.
ROWS, BATCH_BYTES = 64, 2**25
# A column with a higher compression, or a larger dictionary than writers make, may repeat long values. It is read such
# that each value is in memory once, which takes several times as long.
COMPRESSION, DICTIONARY_BYTES = 50.0, 2**22
ROWS_OF_DICTIONARY = 1024
# Rows of a delta encoding, whose values share bytes, so that the library must copy them.
ROWS_OF_DELTA = 16


class Record(NamedTuple):
    """A document of a file, possibly a bad one.

    name: the document's name, which does not depend on where its file is stored. next: the number of the next record,
    from 0. text: null in a bad document; then bad is a key of REASONS, and why says what is wrong and where.
    """

    name: str
    next: int
    text: str | None
    bad: str = ""
    why: str = ""


class Reader:
    """Reads the records of one file, and says how much of the file has been read.

    text_field: the field or column with the text. cut: whether a plain-text file is cut into many documents, at line
    ends; otherwise it is one document. longest: most bytes of a document or line; no more of a longer one is read into
    memory, except in parquet, where a page must fit in memory. Iterating raises DataError for a file that cannot be
    read, ends early or has another format than its name says.
    """

    def __init__(self, file: TextFile, text_field: str, cut: bool = False, longest: int = LONGEST) -> None:
        self.file, self.text_field, self.cut, self.longest = file, text_field, cut, longest
        self._raw: BinaryIO | None = None
        self._size = 0

    @property
    def share_read(self) -> float:
        """The share of the file that has been read, 0 to 1."""
        if self._raw is None or self._raw.closed:
            return 1.0
        return min(1.0, self._raw.tell() / max(self._size, 1))

    def records(self, start: int = 0) -> Iterator[Record]:
        """Yield the records from number `start` on."""
        plain, codec = formats.split_codec(self.file.name)
        with formats.name_file_in_errors(self.file), self._open() as raw:
            if plain.endswith(formats.PARQUET):
                yield from self._rows(raw, start)
                return
            stream = formats.decompress(raw, codec)
            if plain.endswith(formats.JSON):
                formats.check_text(stream.peek(), self.file, json=True)
                if stream.peek().startswith(codecs.BOM_UTF8):
                    stream.read(len(codecs.BOM_UTF8))
                yield from self._lines(stream, start)
            elif self.cut:
                formats.check_text(stream.peek(), self.file, json=False)
                yield from self._pieces(stream, start)
            elif start == 0:
                yield self._whole(stream)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.file.location.startswith("hf://"):
            from depthlm.data.corpora.hub import open_url

            self._raw = open_url(self.file.location)
        else:
            self._raw = open_regular(Path(self.file.location))
        with self._raw:
            self._size = self._raw.seek(0, io.SEEK_END)
            self._raw.seek(0)
            if not self._size and formats.split_codec(self.file.name)[1] is not None:
                raise DataError("an empty file instead of a compressed one", self.file.location, formats.DOWNLOAD)
            yield self._raw

    def _lines(self, stream: io.BufferedReader, start: int) -> Iterator[Record]:
        for number in itertools.count():
            # with its line end, a line may have one byte more
            line = stream.readline(self.longest + 1)
            if not line:
                return
            if too_long := len(line) > self.longest and len(line.rstrip(b"\n")) > self.longest:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(formats.CHUNK)
            if number >= start and too_long:
                yield self._text(number, "line", b"", f"{self.file.name}:{number}", self.longest + 1)
            elif number >= start and not line.isspace():
                yield self._json_document(number, line)

    def _rows(self, raw: BinaryIO, start: int) -> Iterator[Record]:
        for number, value, size in values(raw, self.text_field, start, self.longest, self.file.location):
            yield self._text(number, "row", value, f"{self.file.name}:{number}", size)

    def _whole(self, stream: io.BufferedReader) -> Record:
        content = stream.read(self.longest + 1)
        if len(content) > self.longest:
            # a compressed file may end early, which is an error even if its document is too long
            while stream.read(formats.CHUNK):
                pass
        elif (what := formats.other_format(content)) is not None:
            return Record(self.file.name, 1, None, "utf8", f"the file is {what}, not UTF-8")
        return self._text(0, "", content, self.file.name)

    def _pieces(self, stream: io.BufferedReader, start: int) -> Iterator[Record]:
        size = max(1, min(PIECE, self._size // PIECES))
        # a byte that is not UTF-8 becomes a character that cannot be encoded, so that its piece alone is bad
        text = io.TextIOWrapper(stream, "utf-8", errors="surrogateescape", newline="")
        for number, piece in enumerate(pieces(text, size)):
            if number >= start:
                yield self._text(number, "piece", piece, f"{self.file.name}:{number:08d}")

    def _json_document(self, number: int, line: bytes) -> Record:
        name = f"{self.file.name}:{number}"
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return Record(name, number + 1, None, "utf8", f"line {number + 1} is not UTF-8 ({error.reason})")
        except (ValueError, RecursionError) as error:
            return Record(name, number + 1, None, "json", f"line {number + 1} is not JSON ({error})")
        if not isinstance(value, dict):
            return Record(name, number + 1, None, "json", f"line {number + 1} is not a JSON object")
        text = value.get(self.text_field)
        if not isinstance(text, str):
            what = "is missing" if self.text_field not in value else "is not a string"
            fields = ", ".join(map(repr, value)) or "none"
            why = f"line {number + 1}: the field {self.text_field!r} {what}; there are {fields}"
            return Record(name, number + 1, None, "field", why)
        return self._text(number, "line", text, name)

    def _text(self, number: int, unit: str, text: Any, name: str, size: int | None = None) -> Record:
        """Return the record of a text.

        unit: what the number counts; empty: the file is one document. size: the bytes of the text, given where a text
        that is too long is not read; None: `len(text)`.
        """
        place = f"{unit} {number + 1}{' of the file' if unit == 'piece' else ''}" if unit else "the file"
        if text is None:
            return Record(name, number + 1, None, "field", f"{place} has no {self.text_field!r}")
        if (len(text) if size is None else size) > self.longest:
            why = f"{place} is longer than data.max_document_bytes={self.longest}"
            return Record(name, number + 1, None, "long", why)
        if not text:
            return Record(name, number + 1, None, "empty", f"{place} is empty")
        try:
            # JSON may contain half of a surrogate pair, which UTF-8 cannot encode
            text.encode("utf-8") if isinstance(text, str) else (text := text.decode("utf-8"))
        except UnicodeError as error:
            why = f"{place} is not UTF-8 ({error.reason})"  # type: ignore[attr-defined]
            return Record(name, number + 1, None, "utf8", why)
        return Record(name, number + 1, text)


def documents(
    files: Iterable[TextFile], text_field: str, cut: bool = False, longest: int = LONGEST
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each valid document of the files. Raises DataError for a file that cannot be read."""
    for file in files:
        for record in Reader(file, text_field, cut, longest).records():
            if record.text is not None:
                yield record.name, record.text


def is_validation(identity: str, fraction: float) -> bool:
    """Return whether a document is held out: true for a share `fraction` of all. identity: its text or its name."""
    return fraction >= 1 or (fraction > 0 and hash_share(identity) < fraction)


def held_out_share(identities: Iterable[str], fraction: float) -> float:
    """Return the fraction, raised where needed so that at least one document is held out.

    identities: the texts of all documents, or their names.
    """
    lowest = 1.0
    for identity in identities:
        lowest = min(lowest, hash_share(identity))
        if lowest < fraction:
            return fraction
    return math.nextafter(lowest, 1.0)


def hash_share(text: str) -> float:
    """Return a hash of a text or a name, uniform in [0, 1)."""
    return share_of(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest())


def document_digest() -> blake2b:
    """Return the digest of a document, to be updated with its parts, from which `share_of` takes its hash."""
    return blake2b(digest_size=8)


def share_of(digest: bytes) -> float:
    """Return a digest of 8 bytes as a number in [0, 1)."""
    # A float holds 53 bits: more could round up to 1.
    return (int.from_bytes(digest) >> 11) / 2**53


def digest_of(text: str) -> bytes:
    """Return a digest of a text that no other text has, [16]."""
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def pieces(stream: TextIO, size: int) -> Iterator[str]:
    """Yield pieces of a stream, each cut at the first line end after `size` characters, at most `size` later."""
    while piece := stream.read(size):
        yield piece + stream.readline(size)


def values(raw: BinaryIO, column: str, start: int, longest: int, where: str) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield the number of each row from `start` on, its value, and the value's bytes.

    A value longer than `longest` bytes is yielded as empty. Raises DataError unless the file has exactly one such
    column, and the column has text.
    """
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(raw)
    _check(table.schema_arrow, column, where)
    groups = [_chunks(table.metadata.row_group(group), column) for group in range(table.num_row_groups)]
    max_rows = ROWS
    if any(_may_repeat(chunk) for chunks in groups for chunk in chunks):
        delta = any("DELTA" in encoding for chunks in groups for chunk in chunks for encoding in chunk.encodings)
        max_rows = ROWS_OF_DELTA if delta else ROWS_OF_DICTIONARY
        if not delta:
            table = pyarrow.parquet.ParquetFile(raw, metadata=table.metadata, read_dictionary=[column])
    number = 0
    for group, chunks in enumerate(groups):
        rows = table.metadata.row_group(group).num_rows
        if number + rows <= start:
            number += rows
            continue
        per_row = sum(chunk.total_uncompressed_size for chunk in chunks) / max(rows, 1)
        batch_rows = max(1, min(max_rows, int(BATCH_BYTES / max(per_row, 1))))
        for batch in table.iter_batches(batch_rows, row_groups=[group], columns=[column]):
            # by name: a column with a dot in its name is also the path of a field of a struct
            for value, size in _measure_sizes(batch.column(column), longest):
                if number >= start:
                    yield number, value, size
                number += 1


def _check(schema: "pa.Schema", column: str, where: str) -> None:
    import pyarrow as pa

    count = schema.names.count(column)
    if not count:
        remedy = f"Set data.text_field to one of its columns: {', '.join(schema.names)}."
        raise DataError(f"no column {column!r}", where, remedy)
    if count > 1:
        remedy = "Rename all but one, or set data.text_field to a column whose name is unique."
        raise DataError(f"{count} columns are named {column!r}", where, remedy)
    dtype = schema.field(column).type
    dtype = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    text = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
    if dtype not in text:
        raise DataError(f"the column {column!r} is of type {dtype}", where, "Set data.text_field to a column of text.")


def _chunks(group: Any, column: str) -> list[Any]:
    """Return the metadata of the chunks that reading the column reads."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}.")]


def _may_repeat(chunk: Any) -> bool:
    dictionary = chunk.data_page_offset - chunk.dictionary_page_offset if chunk.has_dictionary_page else 0
    return dictionary > DICTIONARY_BYTES or chunk.total_uncompressed_size > COMPRESSION * chunk.total_compressed_size


def _measure_sizes(array: "pa.Array", longest: int) -> Iterator[tuple[bytes | None, int]]:
    """Yield the values and their sizes, as bytes, so that a value that is not UTF-8 does not fail the others."""
    import pyarrow as pa

    indices = array.indices.to_pylist() if isinstance(array, pa.DictionaryArray) else None
    distinct = array if indices is None else array.dictionary
    if not pa.types.is_binary(distinct.type):
        # these casts copy no value and check none
        distinct = distinct.cast(pa.large_string()) if pa.types.is_string_view(distinct.type) else distinct
        distinct = distinct.cast(pa.large_binary())
    if indices is None and distinct.nbytes <= longest:
        yield from ((value, len(value or b"")) for value in distinct.to_pylist())
        return
    for index in range(len(distinct)) if indices is None else indices:
        value = None if index is None else distinct[index]
        if value is None or not value.is_valid:
            yield None, 0
        else:
            size = value.as_buffer().size
            yield (value.as_py() if size <= longest else b""), size
