"""Helpers: preparing in a process that a test can kill, and the files that remain."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def left_over(folder: Path) -> set[str]:
    """Return what is next to a folder of token files, except lock files."""
    return {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"} - {folder.name}
