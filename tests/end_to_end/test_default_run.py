"""The two commands of the README, with their defaults."""

import json
import subprocess
import time

import pytest

from depthlm.locations import REPOSITORY


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_make_train_learns_well_below_the_unigram_entropy(tmp_path):
    started = time.monotonic()
    done = subprocess.run(
        ["make", "train", f"ARGS=output_dir={tmp_path}/run training.max_steps=300"],  # half of the steps
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"{time.monotonic() - started:.0f} s")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["validation_loss"] < summary["unigram_entropy"] - 1.5
    assert f"{summary['validation_loss']:.4f}" in done.stdout
    assert f"{summary['unigram_entropy']:.3f}" in done.stdout
    assert (tmp_path / "run/loss.png").stat().st_size > 10_000
