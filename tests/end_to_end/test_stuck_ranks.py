"""Two ranks, one of which is killed, fails or hangs: the other exits in time and names that rank."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from depthlm.runs.records import read_run

from ..forks import Forked, Forks
from .test_train import wait_for_step

TIMEOUT = 2.0
MISCHIEF = """
import os, time
from depthlm.mechanisms.residual import Residual

class Mischief(Residual):
    calls = 0

    def read(self, stream):
        Mischief.calls += 1
        if Mischief.calls > 40 and os.environ["RANK"] == "1":
            if os.environ["MISCHIEF"] == "sleep":
                time.sleep(1e6)
            raise ZeroDivisionError("on purpose")
        return super().read(stream)
"""
STAGES = ("training.pipeline.stages=2", "training.pipeline.chunks=1", "training.micro_batch_size=2")
Overrides = Callable[..., list[str]]
Start = Callable[..., list[Forked]]


@pytest.fixture
def two(small_run: Overrides, forks: Forks) -> Iterator[Start]:
    """Start two ranks of an endless run. variables: of the environment."""
    processes: list[Forked] = []

    def start(*overrides: str, **variables: str) -> list[Forked]:
        settings = small_run(
            "training.max_steps=1000000", "training.checkpoint_every=1000", f"training.rank_timeout={TIMEOUT}"
        )
        processes.extend(forks.start_ranks(["train.py", *settings, *overrides], **variables))
        return processes

    yield start
    for process in processes:
        process.kill()
        process.wait()


def ends(process: Forked) -> tuple[float, str]:
    """Wait until this rank exits with 1; return the seconds it took and its output."""
    started = time.monotonic()
    log, _ = process.communicate(60)
    assert process.returncode == 1, log
    return time.monotonic() - started, log


# `python -m tests.chaos` also stops ranks
# data workers inherit the lock of the run directory
@pytest.mark.parametrize("overrides", [("data.num_workers=1",), pytest.param(STAGES, marks=pytest.mark.slow)])
def test_a_dead_rank_ends_the_other(two, tmp_path, overrides):
    ranks = two(*overrides)
    wait_for_step(tmp_path / "run", 3, ranks[0])
    ranks[1].send_signal(signal.SIGKILL)
    seconds, log = ends(ranks[0])
    assert seconds < TIMEOUT + 4
    assert "rank 1 (host " in log
    reason = f"pid {ranks[1].pid}) has sent no heartbeat for 2 s, the last one in step"
    assert reason in log
    assert "Traceback" not in log
    assert reason in (read_run(tmp_path / "run").failure or "")


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_the_other_with_its_message(two, tmp_path):
    (tmp_path / "mischief.py").write_text(MISCHIEF)
    ranks = two(
        "model.connection._target_=mischief.Mischief", "training.rank_timeout=60",
        PYTHONPATH=str(tmp_path), MISCHIEF="raise",
    )  # fmt: skip
    _, other = ends(ranks[1])
    assert "ZeroDivisionError: on purpose" in other
    seconds, log = ends(ranks[0])
    assert seconds < 8
    assert f"pid {ranks[1].pid}) failed: ZeroDivisionError: on purpose; rank 0 ends" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_step_ends_both_with_its_name_and_line(two, tmp_path):
    (tmp_path / "mischief.py").write_text(MISCHIEF)
    ranks = two(
        "model.connection._target_=mischief.Mischief", "training.stall_timeout=0.1",
        PYTHONPATH=str(tmp_path), MISCHIEF="sleep",
    )  # fmt: skip
    for rank in range(2):
        _, log = ends(ranks[rank])
        name = rf"rank 1 \(host {os.uname().nodename}, pid {ranks[1].pid}\)"
        assert re.search(rf"{name} has made no progress for \d+ s, in step", log), log
        assert "forward, at read (mischief.py:" in log
        assert ("time.sleep(1e6)" in log) == (rank == 1)
