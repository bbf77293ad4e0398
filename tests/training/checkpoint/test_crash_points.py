"""Whatever a crash leaves of a run directory, the run resumes, and nothing that was reported as saved is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.training import train

from ...two_ranks import TwoRanks
from ..run_files import assert_same, weights
from .crash_states import SMALL, failures, train_recorded


@pytest.fixture
def overrides(small_run: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[str]]:
    """The overrides of a run in the folder `root`, beside which the events are recorded."""
    (tmp_path / "root").mkdir()
    return lambda *more: small_run(*SMALL, f"output_dir={tmp_path}/root/run", *more)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_crash_loses_nothing_that_was_saved(
    overrides: Callable[..., list[str]], tmp_path: Path, asynchronous: str
) -> None:
    root, given = tmp_path / "root", overrides(f"training.async_checkpoint={asynchronous}")
    assert train_recorded([*given, "training.stop_after=3"], root) == 0
    assert train_recorded(given, root) == 0
    count, found = failures(root, tmp_path)
    print(f"{count} states")
    assert found == []
    assert count > 500


@pytest.mark.slow
def test_a_crash_of_two_ranks_loses_nothing_that_was_saved(
    two_ranks: TwoRanks, overrides: Callable[..., list[str]], tmp_path: Path
) -> None:
    root, given = tmp_path / "root", overrides("training.async_checkpoint=true", "deepspeed=zero1")
    assert two_ranks(train_recorded, [*given, "training.stop_after=3"], root) == [0, 0]
    assert two_ranks(train_recorded, given, root) == [0, 0]
    count, found = failures(root, tmp_path)
    print(f"{count} states")
    assert found == []
    assert count > 500


@pytest.mark.slow
def test_a_run_resumes_from_what_a_crash_has_left_and_equals_an_undisturbed_one(
    overrides: Callable[..., list[str]], tmp_path: Path
) -> None:
    root, given = tmp_path / "root", overrides()
    assert train_recorded([*given, "training.stop_after=3"], root) == 0
    assert train(depthlm.compose([*given, f"output_dir={tmp_path}/undisturbed"])) == 0
    resumed = []

    def resume(folder: Path) -> None:
        number = int(folder.name.split()[1])
        if number % 41 == 0:
            assert train(depthlm.compose([*given, f"output_dir={folder}/run"])) == 0
            assert_same(weights(folder / "run"), weights(tmp_path / "undisturbed"))
            resumed.append(number)

    assert failures(root, tmp_path, resume)[1] == []
    assert len(resumed) > 10


@pytest.mark.parametrize(
    "unsynced",
    [
        "*/.saving-*/deepspeed/*.pt",
        *(
            pytest.param(pattern, marks=pytest.mark.slow)
            for pattern in ("*/model.safetensors", "*/.manifest.json.tmp", "*/.saving-*", "*/deepspeed",
                            "*/checkpoints", "*/metrics.jsonl", "*/root/run", "*/root", "*/.config.yaml.tmp")
        ),
    ],
)  # fmt: skip
def test_a_missing_fsync_is_noticed(overrides: Callable[..., list[str]], tmp_path: Path, unsynced: str) -> None:
    root = tmp_path / "root"
    assert train_recorded([*overrides(), "training.stop_after=2"], root, unsynced) == 0
    assert failures(root, tmp_path)[1]
