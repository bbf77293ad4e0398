"""How far a run is, and the time and the GPU hours that it takes."""

import json

import pytest

from depthlm.runs.progress import mean_mfu, progress_of
from depthlm.runs.records import read_run
from depthlm.sweeps import Point
from depthlm.sweeps.table import print_points

from .made_up import ON_GPUS, write_run


def test_hours_are_those_of_all_gpus_and_the_rest_is_estimated_from_the_newest_rows(tmp_path):
    run = write_run(tmp_path, "run", environment_json=ON_GPUS)
    # 1,000 tokens per row: the first ones at 1 token/s, as while kernels compile, and the last ten at 100
    rows = [
        {"step": 10 * n, "tokens": 1000 * n, "loss": 3.0, "tokens_per_second": 1.0 if n <= 2 else 100.0}
        for n in range(1, 13)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = progress_of(read_run(run))
    assert (progress.step, progress.steps, progress.tokens_per_second) == (120, 400, pytest.approx(100))
    assert progress.remaining_seconds == pytest.approx(280)
    assert progress.gpu_hours == pytest.approx(8 * (2000 + 100) / 3600)
    assert progress.remaining_gpu_hours == pytest.approx(8 * 280 / 3600)


def test_hours_and_mfu_are_those_of_the_ranks_that_trained_each_row_also_in_a_complete_fork(tmp_path):
    # a fork at step 300, which then resumed on one GPU
    rows = [
        {"step": 310, "tokens": 31_000, "loss": 3.0, "interval_updates": 10, "tokens_per_second": 100.0, "mfu": 0.4},
        {"step": 320, "tokens": 32_000, "loss": 3.0, "interval_updates": 10, "tokens_per_second": 10.0, "mfu": 0.2},
    ]
    rows = [row | {"world_size": ranks} for row, ranks in zip(rows, (8, 1), strict=True)]
    summary = {"steps": 320, "wall_seconds": 36_000.0}
    run = write_run(tmp_path, "run", environment_json=ON_GPUS, summary_json=json.dumps(summary))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert progress_of(read_run(run)).gpu_hours == pytest.approx((8 * 10 + 100) / 3600)
    assert mean_mfu(rows) == pytest.approx(2 / (1 / 0.4 + 1 / 0.2))
    assert mean_mfu([]) is None


def test_the_rest_of_a_fork_is_estimated_from_its_own_steps(tmp_path):
    run = write_run(tmp_path, "run", environment_json=ON_GPUS)
    rows = [
        {"step": step, "tokens": 100 * step, "loss": 3.0, "interval_updates": 10, "tokens_per_second": 100.0}
        for step in range(310, 360, 10)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert progress_of(read_run(run)).remaining_seconds == pytest.approx(50)


def test_a_cpu_has_no_gpu_hours_missing_files_no_numbers_and_a_complete_run_those_of_its_summary(tmp_path):
    on_cpu = write_run(tmp_path, "cpu", rows=2, environment_json=ON_GPUS.replace("cuda", "cpu"))
    assert progress_of(read_run(on_cpu)).texts() | {"left": ""} == {
        "step": "20 / 400", "tokens/s": "100", "left": "", "GPU hours": "", "to come": "",
    }  # fmt: skip
    assert {*progress_of(read_run(tmp_path / "none")).texts().values()} == {""}
    # a complete run has those of its summary
    summary = {"steps": 400, "tokens_per_second": 50.0, "wall_seconds": 3600.0}
    run = write_run(tmp_path, "run", environment_json=ON_GPUS, summary_json=json.dumps(summary))
    assert progress_of(read_run(run)).texts() == {
        "step": "400 / 400", "tokens/s": "50", "left": "", "GPU hours": "8", "to come": "",
    }  # fmt: skip


def test_a_sweep_ends_with_its_gpu_hours(tmp_path, capsys):
    begun = write_run(tmp_path, "begun", rows=4, environment_json=ON_GPUS)
    failed = write_run(
        tmp_path, "failed", rows=1, environment_json=ON_GPUS, failure_json='{"error": "no [disk] space"}'
    )
    folders = {"mhc, 2": begun, "dca, 2": failed, "moda, 2": tmp_path / "new"}
    print_points([Point([f"output_dir={path}"], parts={"label": label}) for label, path in folders.items()])
    printed = capsys.readouterr().out
    for part in ("point", "40 / 400", "30 min", "no [disk] space"):
        assert part in printed
    assert printed.splitlines()[-1] == (
        "3 points: 1 stopped, 1 failed, 1 waiting; 0.56 GPU hours so far, 8.3 to come, without 1 point whose speed is "
        "not known"
    )
