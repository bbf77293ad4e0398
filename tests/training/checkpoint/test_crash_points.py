"""Whatever a crash leaves of a run directory, the run resumes, and nothing that was reported as saved is lost."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.errors import UserError
from depthlm.runs.checkpoints import newest_checkpoint
from depthlm.runs.directory import finished
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.monitoring.metrics import MetricsFile

from ...crashes import Recorder, build, crashes
from ...two_ranks import TwoRanks
from ..run_files import assert_same, weights

STEPS = 4


def train_recorded(overrides: list[str], root: Path, unsynced: str = "") -> int:
    """Train on this rank, and record the file operations below a folder."""
    with Recorder(root, root.with_name("events")).recording(unsynced):
        return train(depthlm.compose(overrides))


def wrong(folder: Path, marks: list[str]) -> str | None:
    """Return what is wrong with a run after a crash, or None."""
    run = folder / "run"
    saved = [int(found[1]) for mark in marks if (found := re.fullmatch(r"saved .*/step-(\d+)", mark))]
    try:
        checkpoint = newest_checkpoint(run)
        summary = finished(run)
    except UserError as error:
        return str(error)
    step = 0 if checkpoint is None else checkpoint[1]["step"]
    if step < max(saved, default=0):
        return f"step {max(saved)} was saved, and step {step} is there"
    if summary is not None and step < STEPS:
        return f"complete, and step {step} is there"
    if step == 0:
        return None
    MetricsFile(run / "metrics.jsonl", step, checkpoint[1]["row"] if checkpoint else None)
    rows = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
    return None if rows == list(range(1, step + 1)) else f"the rows of step {step} are {rows}"


def failures(root: Path, tmp_path: Path, every: Callable[[Path], None] = lambda _: None) -> tuple[int, list[str]]:
    """Return the number of states that a crash may leave, and what is wrong with some. every: called for each one."""
    found, count = [], 0
    for count, (tree, marks) in enumerate(crashes(root.with_name("events")), 1):
        folder = tmp_path / f"state {count}"
        build(tree, folder)
        if reason := wrong(folder, marks):
            found.append(f"state {count}, after {marks[-1:]}: {reason}")
        else:
            every(folder)
        shutil.rmtree(folder)
    return count, found


SMALL = ("size.hidden_size=8", "size.head_size=4", "size.intermediate_size=8", "size.num_layers=1",
         "training.checkpoint_every=1", "training.keep_last=1", "training.log_every=1", "training.sample=null",
         f"training.max_steps={STEPS}", "training.validate_every=2", "training.validation_tokens=64")  # fmt: skip


@pytest.fixture
def overrides(small_run: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[str]]:
    """The overrides of a run in the folder `root`, beside which the events are recorded."""
    (tmp_path / "root").mkdir()
    return lambda *more: small_run(*SMALL, f"output_dir={tmp_path}/root/run", *more)


@pytest.mark.parametrize("asynchronous", [pytest.param("false", marks=pytest.mark.slow), "true"])
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
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_crash_of_two_ranks_loses_nothing_that_was_saved(
    two_ranks: TwoRanks, overrides: Callable[..., list[str]], tmp_path: Path, asynchronous: str
) -> None:
    root, given = tmp_path / "root", overrides(f"training.async_checkpoint={asynchronous}", "deepspeed=zero1")
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
