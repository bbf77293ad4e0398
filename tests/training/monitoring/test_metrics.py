"""Rows of metrics, the stopwatch and peak FLOP/s."""

import json
import resource
from unittest.mock import patch

import torch
from torch.distributed import get_rank

from depthlm.runs.records import ValidationLosses, read_metrics
from depthlm.training.monitoring.metrics import MetricsFile, peak_memory_gib


def test_rows_are_appended_amended_and_truncated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.write({"step": 1, "loss": 2.0})
    metrics.write({"step": 2, "loss": 1.5})
    metrics.amend({"validation/set/loss": 1.25})
    assert ValidationLosses.of_row(metrics.last).by_set == {"set": 1.25}
    metrics.write({"step": 3, "loss": None})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == list(read_metrics(path))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["validation/set/loss"] == 1.25
    assert MetricsFile(path, 2).last["step"] == 2
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_an_invalid_end_of_a_file_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(1, 5))
    for torn in ("", '{"step": 5, "lo', '{"step": 5}', "\x00\x00\x00\n", "\n"):
        path.write_text(rows + torn)
        assert MetricsFile(path, 9).last == {"step": 4}
        assert path.read_text() == rows
    for torn in ("", '{"step"'):
        path.write_text(torn)
        assert MetricsFile(path, 9).last == {}
        assert path.read_text() == ""


def test_rows_that_cannot_be_written_are_kept_in_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.write({"step": 1, "loss": 1.0})
    written = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 7, limits[1]))
    try:
        metrics.write({"step": 2, "loss": 1.0})
        metrics.amend({"validation/set/loss": 1.0})
        metrics.write({"step": 3, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [row["step"] for row in read_metrics(path)] == [1]
    metrics.write({"step": 4, "loss": 1.0})
    metrics.amend({"validation/set/loss": 2.0})
    expected = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 1.0, "validation/set/loss": 1.0},
        {"step": 3, "loss": 1.0},
    ]
    assert list(read_metrics(path)) == [*expected, {"step": 4, "loss": 1.0, "validation/set/loss": 2.0}]


def peak_of_two_ranks() -> float:
    with patch("depthlm.training.monitoring.metrics.peak_process_bytes", lambda: (1 + get_rank()) * 2**30):
        return peak_memory_gib(torch.device("cpu"))


def test_the_peak_memory_is_that_of_the_rank_with_the_most(two_ranks):
    assert two_ranks(peak_of_two_ranks) == [2.0, 2.0]
