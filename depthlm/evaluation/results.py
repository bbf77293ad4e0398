"""The results of a checkpoint in evaluation.json."""

import json
from pathlib import Path
from typing import Any

from depthlm.files import read_json, replace_text


def add_results(path: Path, step: int, results: dict[str, Any]) -> dict[str, Any]:
    """Add results of the checkpoint of a step to evaluation.json, and return its content. Raises OSError.

    Results of another checkpoint are dropped.
    """
    before = read_json(path)
    kept = before if before.get("step") == step else {}
    recorded = {"step": step} | kept | results
    replace_text(path, json.dumps(recorded, indent=1) + "\n")
    return recorded
