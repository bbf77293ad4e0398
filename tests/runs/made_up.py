"""Run directories with made-up content, in every state."""

import json
import os
import time
from pathlib import Path

import pytest

ROW = {"step": 10, "tokens": 5000, "loss": 3.25, "mean_loss": 3.25}
# the environment.json of a run of 400 steps on 8 GPUs
ON_GPUS = json.dumps({"device_type": "cuda", "world_size": 8, "steps": 400})


def write_run(
    root: Path, name: str, *, model: str = "vanilla", size: str = "micro", rows: int = 0, age: float = 0.0, **files: str
) -> Path:
    """Create a run directory. files: additional files by name, such as `summary_json` for summary.json."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model: {{name: '{model}'}}\nsize: {{name: '{size}'}}\n")
    if rows:
        speed = {"tokens_per_second": 100.0} if "environment_json" in files else {}
        lines = [ROW | speed | {"step": 10 * (number + 1), "tokens": 5000 * (number + 1)} for number in range(rows)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    for file in folder.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of every state, with names in the order of their age."""
    monkeypatch.chdir(tmp_path)
    root = Path("outputs")
    summary = json.dumps({"steps": 20, "tokens": 9999, "validation_loss": 2.5})
    write_run(root, "default/base", rows=2, age=400_000, summary_json=summary)
    write_run(root, "default/broken", model="mhc", rows=1, age=7200, failure_json='{"error": "diverged"}')
    write_run(root, "sweep/begun", model="mhc", size="tiny", rows=1, age=90)
    write_run(root, "sweep/new", age=5)
    return root
