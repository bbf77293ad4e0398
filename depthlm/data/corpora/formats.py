"""The format of a file: what its name and its first bytes say, and the decompressed text in it."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from depthlm.errors import DataError

CHUNK = 2**20
DOWNLOAD = "Download or copy the file again."

# Suffixes in lower case; any case is read.
COMPRESSED = (".gz", ".zst")
JSON = (".jsonl", ".ndjson", ".jl", ".json")
PARQUET = ".parquet"

# The first bytes of formats that are not UTF-8, and the names of the formats.
_SIGNATURES = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\0\0\xfe\xff": "UTF-32",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\0": "compressed by xz",
}
_REMEDIES = {
    **{f"UTF-{bits}": f"Convert it: iconv -f UTF-{bits} -t UTF-8 <file> > <new file>." for bits in (16, 32)},
    "compressed by gzip": "Add .gz to its name (and to data.suffixes).",
    "compressed by zstd": "Add .zst to its name (and to data.suffixes).",
    "compressed by xz": "Decompress it: only .gz and .zst are read.",
}
_ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
_SPREAD = re.compile(rb"\s*\{\s*\n")


class TextFile(NamedTuple):
    """A text file: its name below the root, the same locally and on the hub, and the location to open."""

    name: str
    location: str


def split_codec(name: str) -> tuple[str, str | None]:
    """Return the name in lower case without its compression suffix, and this suffix."""
    name = name.lower()
    suffix = Path(name).suffix
    return (name[: -len(suffix)], suffix) if suffix in COMPRESSED else (name, None)


def is_records(name: str) -> bool:
    """Return whether a file with this name has many documents, as lines of JSON or rows of parquet."""
    return split_codec(name)[0].endswith((*JSON, PARQUET))


def decompress(raw: BinaryIO, codec: str | None) -> io.BufferedReader:
    """Return a stream of the decompressed text, which raises where the file ends within a frame."""
    stream: Any = raw
    if codec == ".gz":
        import gzip

        stream = gzip.GzipFile(fileobj=raw)
    elif codec == ".zst":
        from backports import zstd

        # as `zstd -d --long=31`: a window of up to 2 GiB, of which memory is used only as far as the text is long
        stream = zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: 31})
    return io.BufferedReader(stream, CHUNK)


def other_format(head: bytes) -> str | None:
    """Return the format of a file that begins with these bytes, if it is a known one other than UTF-8."""
    return next((name for start, name in _SIGNATURES.items() if head.startswith(start)), None)


def check_text(head: bytes, file: TextFile, json: bool) -> None:
    """Raise DataError where the first bytes of a file of many documents show another format.

    json: whether it should have one JSON object per line.
    """
    what = other_format(head) or ("UTF-16" if json and b"\0" in head[:4] else None)
    if what is not None:
        raise DataError(f"the file is {what}, not UTF-8", file.location, _REMEDIES[what])
    head = head.removeprefix(b"\xef\xbb\xbf")
    if json and _ARRAY.match(head):
        remedy = "Write each object on a line of its own: jq -c '.[]' <file> > <new file>.jsonl."
        raise DataError("the file is one array of JSON, not an object per line", file.location, remedy)
    if json and _SPREAD.match(head):
        remedy = "Write each object on a line of its own: jq -c . <file> > <new file>.jsonl."
        raise DataError("a JSON object takes several lines of the file", file.location, remedy)


@contextmanager
def name_file_in_errors(file: TextFile) -> Iterator[None]:
    """Convert errors of the libraries to a DataError that names the file."""
    import zlib

    import pyarrow as pa
    from backports import zstd

    try:
        yield
    except DataError:
        raise
    except PermissionError as error:
        raise DataError("you may not read the file", file.location, "Change its permissions: chmod u+r.") from error
    except (OSError, EOFError, pa.ArrowException, zlib.error, zstd.ZstdError) as error:
        what = f"cannot be read to its end ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        raise DataError(what, file.location, DOWNLOAD) from error
