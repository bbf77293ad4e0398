"""Fixtures: a small folder of text, and a configuration that reads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from depthlm.data.settings import Data

WORDS = ["one", "two", "naïve", "Ω\tfour\r\n五", "🙂", "seven", "<|endoftext|>", "nine"]


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    for number in range(60):
        file = folder / f"part{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(WORDS[(number * k) % len(WORDS)] for k in range(20 + number))
        file.write_bytes(text.encode())
    return folder


@pytest.fixture
def local(text_folder: Path) -> Callable[..., Data]:
    def make(**changes: Any) -> Data:
        settings = {"name": "local", "source": str(text_folder), "vocab_size": 300, "validation_fraction": 0.2}
        return Data(**(settings | changes))

    return make
