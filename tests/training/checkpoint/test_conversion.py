"""A conversion whose process was killed ends soon, and cannot disturb the next one."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import depthlm
from depthlm.run_directory import RunDirectory
from depthlm.training import train

from ...forks import Forks
from ...two_ranks import TwoRanks, train_on_ranks
from ..run_files import assert_same, checkpoint, states, weights
from .crash_states import SMALL, train_converting_here

CONVERT = """
import sys
from pathlib import Path
from depthlm.training.engine import convert
convert(*(Path(name) for name in sys.argv[1:]))
"""


@pytest.fixture
def of_two_ranks(
    two_ranks: TwoRanks, small_run: Callable[..., list[str]], tmp_path: Path
) -> Callable[[str], list[str]]:
    """Train a run on two ranks. Returns the overrides that resume a copy with this name, on another number of ranks."""
    overrides = small_run(*SMALL, "deepspeed=zero1", f"output_dir={tmp_path}/run")
    assert two_ranks(train_on_ranks, [*overrides, "training.stop_after=2"]) == [0, 0]

    def copied(name: str) -> list[str]:
        shutil.copytree(tmp_path / "run", tmp_path / name)
        return [*overrides, f"output_dir={tmp_path}/{name}", "training.stop_after=3"]

    return copied


@pytest.mark.slow
def test_the_converter_of_a_process_that_was_killed_fails_soon(
    of_two_ranks: Callable[[str], list[str]], forks: Forks, tmp_path: Path
) -> None:
    source, folder = checkpoint(tmp_path / "run"), tmp_path / "converted"
    parent = forks.start(["-c", CONVERT, source, folder])
    deadline = time.monotonic() + 60
    # its processes write the slices, and end before the folder `tmp` is removed
    while not (slices := folder / "deepspeed/tmp").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    (converter,) = psutil.Process(parent.pid).children()
    os.killpg(converter.pid, signal.SIGSTOP)
    processes = [converter, *converter.children()]
    assert slices.exists()
    assert len(processes) > 1
    parent.kill()
    parent.wait(10)
    os.killpg(converter.pid, signal.SIGCONT)
    # its next line of output has no reader
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    assert slices.exists()


def test_a_conversion_that_is_still_running_elsewhere_cannot_disturb_the_next(
    of_two_ranks: Callable[[str], list[str]], tmp_path: Path
) -> None:
    assert train_converting_here(of_two_ranks("undisturbed")) == 0
    overrides, run = of_two_ranks("disturbed"), RunDirectory(tmp_path / "disturbed")
    earlier = run.universal(checkpoint(run.path))
    ended = threading.Event()

    def keep_writing() -> None:
        """Write zeros, as an earlier conversion does that a lost node still runs, wherever its files are removed."""
        while not ended.wait(0.001):
            for name in ("layers.0.mlp.down_proj.weight", "norm.weight"):
                file = earlier / "deepspeed/zero" / name / "exp_avg.pt"
                with suppress(OSError, RuntimeError):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    torch.save({"param": torch.zeros(8)}, file)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        assert train_converting_here(overrides) == 0
    finally:
        ended.set()
        writer.join()
    assert_same(weights(run.path), weights(tmp_path / "undisturbed"))
    assert_same(states(run.path), states(tmp_path / "undisturbed"))
    # the next checkpoint removes what the earlier conversion has left
    assert train(depthlm.compose([*overrides, "training.stop_after=4"])) == 0
    assert run.leftovers() == []
