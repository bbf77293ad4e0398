"""The wall clock jumps by hours, as when a machine corrects it: everything that measures a duration ignores that."""

import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from depthlm.run_directory import RunDirectory
from depthlm.runs import directory
from depthlm.runs.directory import Claim, lock_run_directory
from depthlm.runs.records import read_metrics

from ..two_ranks import train_on_ranks
from .run_files import curve

HOUR = 3600.0


@contextmanager
def jumping_clock() -> Iterator[None]:
    """Let the wall clock be hours ahead or behind, in turns."""
    now, jumps = time.time, itertools.cycle([0.0, 5 * HOUR, -7 * HOUR, 2 * HOUR])
    with mock.patch("time.time", side_effect=lambda: now() + next(jumps)):
        yield


def train_with_a_jumping_clock(overrides: list[str]) -> int | str:
    """Train on this rank while the wall clock jumps."""
    with jumping_clock():
        return train_on_ranks(overrides)


def test_jumps_of_the_wall_clock_change_neither_checkpoints_nor_timings(two_ranks, small_run, tmp_path):
    overrides = small_run("training.max_steps=6", "training.checkpoint_every=100", "training.checkpoint_minutes=60",
                          "training.keep_last=9", "training.rank_timeout=60", "training.stall_timeout=60")  # fmt: skip
    began = time.monotonic()
    assert two_ranks(train_with_a_jumping_clock, overrides) == [0, 0]
    elapsed = time.monotonic() - began
    assert [path.name for path in RunDirectory(tmp_path / "run").checkpoint_folders()] == ["step-00000006"]
    rows = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    # a step of 128 tokens takes no longer than the run
    assert all(128 / elapsed <= row["tokens_per_second"] < math.inf for row in rows)
    assert [row[:2] for row in curve(tmp_path / "run")] == [(step, 128 * step) for step in range(1, 7)]


def test_jumps_of_the_wall_clock_do_not_end_the_wait_for_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "LOCK_SECONDS", HOUR)
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_run_directory(Claim(RunDirectory(tmp_path))):
            holding.set()
            release.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    holding.wait(60)
    sleep = time.sleep
    # the other process ends while this one waits
    monkeypatch.setattr(time, "sleep", lambda seconds: (sleep(seconds / 10), release.set()))
    with jumping_clock(), lock_run_directory(Claim(RunDirectory(tmp_path))):
        assert release.is_set()
    other.join()
