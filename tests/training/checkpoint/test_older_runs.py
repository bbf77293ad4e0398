"""A run directory and checkpoint written by an older version of the code."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.runs.records import read_metrics
from depthlm.training import train

OLDER = Path(__file__).parent / "older_run"
# losses of steps 11 to 20 in an uninterrupted run of the older version
LOSSES = [
    5.234915733337402, 5.177340030670166, 5.177633762359619, 5.143374443054199, 5.1241559982299805,
    5.119180679321289, 5.095236778259277, 5.0739426612854, 5.05490779876709, 5.006309509277344,
]  # fmt: skip


def test_a_run_of_an_older_version_resumes(
    small_run: Callable[..., list[str]], corpus_folder: Path, token_folder: Path, tmp_path: Path
) -> None:
    assert train(depthlm.compose(small_run("training.max_steps=1", name="prepares the tokens"))) == 0
    run = tmp_path / "older"
    shutil.copytree(OLDER, run)
    for file in (run / "config.yaml", run / "checkpoints/step-00000010/manifest.json"):
        text = file.read_text()
        for name, path in (("RUN", run), ("CORPUS", corpus_folder), ("TOKENS", token_folder)):
            text = text.replace(name, str(path))
        file.write_text(text)
    model, _ = depthlm.load(run)
    assert type(model.connections[0]).__name__ == "DeepCrossAttention"
    assert train(depthlm.compose([f"run={run}", "training.stop_after=null", "trust=run"])) == 0
    rows = list(read_metrics(run / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["loss"] for row in rows[10:]] == pytest.approx(LOSSES, rel=1e-4)
    assert [row["mean_loss"] for row in rows[10:]] == [row["loss"] for row in rows[10:]]
