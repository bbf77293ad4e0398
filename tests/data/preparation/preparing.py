"""Helpers: a slow preparation that a test can kill, and the files that remain."""

from pathlib import Path

# Waits for a line or the end of stdin, then prepares slowly, so that a kill can interrupt any part of it.
SLOW = """
import sys, time
from depthlm.data.settings import Data
from depthlm.data import prepare
from depthlm.data.preparation import encode

from depthlm.data.preparation.progress import SplitWriter
encode.BATCH = 200
add = SplitWriter.add
SplitWriter.add = lambda *arguments: (time.sleep(0.005), add(*arguments))
print("ready", flush=True)
sys.stdin.readline()
prepare(Data(name="local", source=sys.argv[1], vocab_size=300, validation_fraction=0.2, shard_tokens=500))
"""


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def left_over(folder: Path) -> set[str]:
    """Return what is next to a folder of token files, except lock files."""
    return {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"} - {folder.name}
