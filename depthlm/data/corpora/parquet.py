"""The values of one column of a parquet file, in memory that does not grow with how often a value is repeated."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from depthlm.data.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that are read at once: fewer where they have more than BATCH_BYTES.
ROWS, BATCH_BYTES = 64, 2**25
# A column that is compressed more than this, or has a larger dictionary than writers make, may repeat long values. Then
# each is in memory once, which takes several times as long to read.
COMPRESSION, DICTIONARY_BYTES = 50.0, 2**22
ROWS_OF_DICTIONARY = 1024
# Rows of an encoding whose values share bytes, and which the library cannot read without copying them.
ROWS_OF_DELTA = 16


def values(raw: BinaryIO, column: str, first: int, longest: int, where: str) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield the number of each row from `first` on, its value, and the value's bytes.

    A value longer than `longest` bytes is empty here. Raises DataError for a file without exactly one such column, or
    if it has no text.
    """
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(raw)
    _check(table.schema_arrow, column, where)
    groups = [_chunks(table.metadata.row_group(group), column) for group in range(table.num_row_groups)]
    most = ROWS
    if any(_may_repeat(chunk) for chunks in groups for chunk in chunks):
        delta = any("DELTA" in encoding for chunks in groups for chunk in chunks for encoding in chunk.encodings)
        most = ROWS_OF_DELTA if delta else ROWS_OF_DICTIONARY
        if not delta:
            table = pyarrow.parquet.ParquetFile(raw, metadata=table.metadata, read_dictionary=[column])
    number = 0
    for group, chunks in enumerate(groups):
        rows = table.metadata.row_group(group).num_rows
        if number + rows <= first:
            number += rows
            continue
        per_row = sum(chunk.total_uncompressed_size for chunk in chunks) / max(rows, 1)
        batch_rows = max(1, min(most, int(BATCH_BYTES / max(per_row, 1))))
        for batch in table.iter_batches(batch_rows, row_groups=[group], columns=[column]):
            # by name: a column with a dot in its name is also the path of a field of a struct
            for value, size in _sized(batch.column(column), longest):
                if number >= first:
                    yield number, value, size
                number += 1


def _may_repeat(chunk: Any) -> bool:
    dictionary = chunk.data_page_offset - chunk.dictionary_page_offset if chunk.has_dictionary_page else 0
    return dictionary > DICTIONARY_BYTES or chunk.total_uncompressed_size > COMPRESSION * chunk.total_compressed_size


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


def _sized(array: "pa.Array", longest: int) -> Iterator[tuple[bytes | None, int]]:
    """Yield the values and their bytes; as bytes, so that one that is not UTF-8 does not fail its neighbours."""
    import pyarrow as pa

    indices = array.indices.to_pylist() if isinstance(array, pa.DictionaryArray) else None
    known = array if indices is None else array.dictionary
    if not pa.types.is_binary(known.type):
        # from the other types of text, the way to bytes that copies no value and checks none
        known = known.cast(pa.large_string()) if pa.types.is_string_view(known.type) else known
        known = known.cast(pa.large_binary())
    if indices is None and known.nbytes <= longest:
        yield from ((value, len(value or b"")) for value in known.to_pylist())
        return
    for index in range(len(known)) if indices is None else indices:
        value = None if index is None else known[index]
        if value is None or not value.is_valid:
            yield None, 0
        else:
            size = value.as_buffer().size
            yield (value.as_py() if size <= longest else b""), size
