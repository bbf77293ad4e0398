"""Whatever a crash leaves of a run that forks another one, the same command starts or resumes it."""

from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.runs.checkpoints import read_manifest
from depthlm.training import train

from ...crashes import Recorder
from ..run_files import assert_same, checkpoint, weights
from .crash_states import SMALL, failures, train_recorded

START = 2


@pytest.fixture
def fork(small_run: Callable[..., list[str]], tmp_path: Path) -> list[str]:
    """The overrides of a fork `root/run` of `root/source`, which is trained before anything is recorded."""
    root = tmp_path / "root"
    assert train(depthlm.compose(small_run(*SMALL, f"training.stop_after={START}", f"output_dir={root}/source"))) == 0
    Recorder(root, tmp_path / "events").settle()
    return small_run(*SMALL, f"fork_from={root}/source", f"output_dir={root}/run", "optimizer.lr=1e-4")


@pytest.mark.slow
def test_a_crash_of_a_fork_loses_nothing_that_was_saved_and_leaves_its_source_valid(
    fork: list[str], tmp_path: Path
) -> None:
    root, resumed = tmp_path / "root", []
    assert train_recorded(fork, root) == 0
    undisturbed = root.rename(tmp_path / "undisturbed")

    def check(folder: Path) -> None:
        read_manifest(checkpoint(folder / "source", START))
        if int(folder.name.split()[1]) % 61 == 0:
            # the paths of both runs are part of the configuration
            folder.rename(root)
            assert train(depthlm.compose(fork)) == 0
            assert_same(weights(root / "run"), weights(undisturbed / "run"))
            resumed.append(root.rename(folder))

    count, found = failures(root, tmp_path, check, start=START)
    print(f"{count} states, {len(resumed)} resumed")
    assert found == []
    assert count > 300
    assert len(resumed) > 5


def test_a_missing_fsync_of_a_fork_is_noticed(fork: list[str], tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert train_recorded([*fork, "training.stop_after=3"], root, "*/run/checkpoints") == 0
    assert failures(root, tmp_path, start=START)[1]
