"""The records in the file of an offline W&B run, which is a LevelDB log of protocol buffers."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as messages

# bytes: of W&B's own header, of a block of the log, of the header of a fragment
PREFIX, BLOCK, HEADER = 7, 32768, 7
FULL, LAST = 1, 4


def records(folder: Path) -> list[Any]:
    """Return the records of the finished runs in a W&B folder, in order. W&B's process may still be writing them."""
    deadline = time.monotonic() + 20
    while True:
        runs = [list(_of_file(file.read_bytes())) for file in sorted(folder.glob("offline-run-*/*.wandb"))]
        if runs and all(run and run[-1].HasField("exit") for run in runs):
            return [record for run in runs for record in run]
        assert time.monotonic() < deadline, f"{folder} has a run without an end: {[len(run) for run in runs]} records"
        time.sleep(0.05)


def _of_file(content: bytes) -> Iterator[Any]:
    position, parts = PREFIX, []
    while position + HEADER <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + HEADER : position + HEADER + length])
        position += HEADER + length
        if kind in (FULL, LAST):
            yield messages.Record.FromString(b"".join(parts))
            parts = []
