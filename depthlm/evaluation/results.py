"""The results of a checkpoint in evaluation.json."""

import json
from pathlib import Path
from typing import Any

from depthlm.files import replace_text


def add_results(path: Path, step: int, results: dict[str, Any]) -> dict[str, Any]:
    """Add results of the checkpoint of a step to evaluation.json, and return its content. Raises OSError.

    Results of another checkpoint are dropped.
    """
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    kept = before if isinstance(before, dict) and before.get("step") == step else {}
    recorded = {"step": step} | kept | results
    replace_text(path, json.dumps(recorded, indent=1) + "\n")
    return recorded
