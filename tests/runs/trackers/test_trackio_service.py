"""Trackio's own database has what a run has recorded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trackio")

# Trackio reads the folder of its database when it is imported
RECORD = """
from pathlib import Path
from depthlm.config.schema import Tracker
from depthlm.runs.trackers import start_trackers
for step in (1, 2):
    config = Tracker(trackio=True, project="trial")
    settings = {"experiment": {"name": "moda/scaling"}}
    trackers = start_trackers(config, Path("runs/one"), settings, None, resumed_at=step - 1)
    trackers.write({"step": step, "loss": 0.5 / step})
    trackers.alert("bad batch", "skipped", step)
    trackers.close({"validation_loss": 0.25} if step == 2 else None)
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("trial", "runs/one")
print([(row["step"], row["loss"]) for row in rows if "loss" in row])
print([row["summary/validation_loss"] for row in rows if "summary/validation_loss" in row])
print([(alert["title"], alert["step"]) for alert in SQLiteStorage.get_alerts("trial")])
"""


def test_a_run_that_is_resumed_is_one_run_with_the_steps_of_metrics_and_nothing_is_printed(tmp_path: Path) -> None:
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", RECORD], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        "[(1, 0.5), (2, 0.25)]", "[0.25]", "[('bad batch', 2), ('bad batch', 1)]"
    ], done.stderr  # fmt: skip
