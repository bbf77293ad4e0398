"""Whatever a crash leaves of a run directory, the run resumes, and nothing that was reported as saved is lost."""

from pathlib import Path

import pytest

import depthlm
from depthlm.runs.checkpoints import read_manifest
from depthlm.training import train

from ...crashes import Recorder
from ..run_files import Overrides, assert_same, checkpoint, weights
from .crash_states import SMALL, failures, train_recorded

# the step of the source of a fork
START = 2


@pytest.fixture
def overrides(small_run: Overrides, tmp_path: Path) -> Overrides:
    """The overrides of a run in the folder `root`, beside which the events are recorded."""
    (tmp_path / "root").mkdir()
    return lambda *more: small_run(*SMALL, f"output_dir={tmp_path}/root/run", *more)


@pytest.mark.slow
def test_a_crash_loses_nothing_that_was_saved_and_the_run_resumes_as_if_undisturbed(overrides, tmp_path):
    root, given, resumed = tmp_path / "root", overrides(), []
    assert train_recorded([*given, "training.stop_after=3"], root) == 0
    assert train_recorded(given, root) == 0
    assert train(depthlm.compose([*given, f"output_dir={tmp_path}/undisturbed"])) == 0

    def resume(folder: Path) -> None:
        if int(folder.name.split()[1]) % 101 == 0:
            assert train(depthlm.compose([*given, f"output_dir={folder}/run"])) == 0
            assert_same(weights(folder / "run"), weights(tmp_path / "undisturbed"))
            resumed.append(folder)

    count, found = failures(root, tmp_path, resume)
    print(f"{count} states, {len(resumed)} resumed")
    assert found == []
    assert count > 500
    assert len(resumed) > 5


@pytest.mark.release
@pytest.mark.parametrize("stage", ["zero0", "zero1"])
def test_a_crash_while_a_checkpoint_is_saved_asynchronously_loses_nothing_on_one_rank_and_on_two(
    two_ranks, overrides, tmp_path, stage
):
    root, given = tmp_path / "root", overrides("training.async_checkpoint=true", f"deepspeed={stage}")
    for stop in ("3", "null"):
        settings = [*given, f"training.stop_after={stop}"]
        if stage == "zero0":
            assert train_recorded(settings, root) == 0
        else:
            assert two_ranks(train_recorded, settings, root) == [0, 0]
    count, found = failures(root, tmp_path)
    print(f"{count} states")
    assert found == []
    assert count > 500


@pytest.mark.parametrize(
    "unsynced",
    [
        pytest.param("*/.saving-*/deepspeed/*.pt", marks=pytest.mark.slow),
        *(
            pytest.param(pattern, marks=pytest.mark.release)
            for pattern in ("*/model.safetensors", "*/.manifest.json.tmp", "*/.saving-*", "*/deepspeed",
                            "*/checkpoints", "*/metrics.jsonl", "*/root/run", "*/root", "*/.config.yaml.tmp")
        ),
    ],
)  # fmt: skip
def test_a_missing_fsync_is_noticed(overrides, tmp_path, unsynced):
    root = tmp_path / "root"
    assert train_recorded([*overrides(), "training.stop_after=2"], root, unsynced) == 0
    assert failures(root, tmp_path)[1]


@pytest.fixture
def fork(small_run: Overrides, tmp_path: Path) -> list[str]:
    """The overrides of a fork `root/run` of `root/source`, which is trained before anything is recorded."""
    root = tmp_path / "root"
    assert train(depthlm.compose(small_run(*SMALL, f"training.stop_after={START}", f"output_dir={root}/source"))) == 0
    Recorder(root, tmp_path / "events").settle()
    return small_run(*SMALL, f"fork_from={root}/source", f"output_dir={root}/run", "optimizer.lr=1e-4")


@pytest.mark.slow
def test_a_crash_of_a_fork_loses_nothing_that_was_saved_and_leaves_its_source_valid(fork, tmp_path):
    root, resumed = tmp_path / "root", []
    assert train_recorded(fork, root) == 0
    undisturbed = root.rename(tmp_path / "undisturbed")

    def check(folder: Path) -> None:
        read_manifest(checkpoint(folder / "source", START))
        if int(folder.name.split()[1]) % 101 == 0:
            # the paths of both runs are part of the configuration
            folder.rename(root)
            assert train(depthlm.compose(fork)) == 0
            assert_same(weights(root / "run"), weights(undisturbed / "run"))
            resumed.append(root.rename(folder))

    count, found = failures(root, tmp_path, check, start=START)
    print(f"{count} states, {len(resumed)} resumed")
    assert found == []
    assert count > 300
    assert len(resumed) > 2


@pytest.mark.release
def test_a_missing_fsync_of_a_fork_is_noticed(fork, tmp_path):
    root = tmp_path / "root"
    assert train_recorded([*fork, "training.stop_after=3"], root, "*/run/checkpoints") == 0
    assert failures(root, tmp_path, start=START)[1]
