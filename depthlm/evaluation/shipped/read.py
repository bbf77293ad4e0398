"""Read the questions of the tasks in this folder, for the harness."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def python_words(**_: Any) -> dict[str, Dataset]:
    """Return the questions of python_words, by split."""
    lines = Path(__file__).with_name("python_words.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
