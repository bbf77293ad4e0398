"""Saving checkpoints: a full disk, a slow disk or a kill while saving never costs the run."""

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import depthlm
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import read_manifest
from depthlm.training import train
from depthlm.training.checkpoint import saving
from depthlm.training.checkpoint.saving import Saver, Snapshot

from ...two_ranks import train_on_ranks
from ..run_files import assert_same, curve, states, weights


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, after validating each of them."""
    paths = sorted((directory / "checkpoints").glob("step-*"))
    return [read_manifest(path).step for path in paths]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Make writes beyond this file size fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fail_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Limit files to 100 kB while the checkpoints of these steps are written."""
    save = Saver.save

    def limited(self: Saver, progress: dict[str, Any], *, last: bool) -> None:
        if progress["step"] not in steps:
            return save(self, progress, last=last)
        with files_no_larger_than(100_000):
            return save(self, progress, last=last)

    monkeypatch.setattr(Saver, "save", limited)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_write_leaves_earlier_checkpoints_intact_and_the_run_alive(
    trained, train_run, monkeypatch, asynchronous
):
    undisturbed = trained("training.max_steps=10", name="undisturbed")
    fail_at(monkeypatch, 4, 6)
    if asynchronous:
        # otherwise the limit ends before the other thread writes
        monkeypatch.setattr(Saver, "_start", _then_wait(Saver._start))
    run = train_run("training.max_steps=10", "training.checkpoint_every=2", "training.keep_last=1",
                    "training.keep_every=4", f"training.async_checkpoint={asynchronous}")  # fmt: skip
    assert saved_steps(run) == [8, 10]
    log = (run / "train.log").read_text()
    assert "step-00000004 was not saved: " in log
    assert "earlier checkpoints are intact" in log
    assert curve(run) == curve(undisturbed)
    assert not list((run / "checkpoints").glob(".*"))


def _then_wait(start: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(self: Saver, *arguments: Any, **settings: Any) -> Any:
        failure = start(self, *arguments, **settings)
        while self.busy():
            threading.Event().wait(0.01)
        return failure

    return waiting


def test_without_disk_space_nothing_is_written(trained, train_run, small_run, monkeypatch):
    overrides = ("training.max_steps=10", "training.checkpoint_every=3")
    run = train_run(*overrides, "training.stop_after=6")
    with monkeypatch.context() as patch:
        patch.setattr(saving.shutil, "disk_usage", lambda path: SimpleNamespace(free=3000))
        assert train(depthlm.compose(small_run(*overrides))) == 1
    log = (run / "train.log").read_text()
    assert "step-00000009 was not saved: 0.00 GiB are needed in" in log
    assert "the last checkpoint could not be written" in log
    assert saved_steps(run) == [3, 6]
    assert not (run / "summary.json").exists()
    assert curve(train_run(*overrides)) == curve(trained("training.max_steps=10", name="undisturbed"))


def test_the_space_required_is_the_size_written(train_run, monkeypatch):
    required: list[int] = []
    make_room = saving._make_room
    monkeypatch.setattr(
        saving, "_make_room", lambda run, path, size: (required.append(size), make_room(run, path, size))
    )
    for stage in ("zero0", "zero1"):
        run = train_run(f"deepspeed={stage}", "training.max_steps=1", name=stage)
        written = sum(file.stat().st_size for file in run.glob("checkpoints/step-00000001/**/*") if file.is_file())
        assert required.pop() == pytest.approx(written, rel=0.15)


def train_with_a_failing_second_rank(overrides: list[str]) -> int | str:
    """Train, with rank 1 failing to write its part of the checkpoint of step 4."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            fail_at(patch, 4)
        return train_on_ranks(overrides)


def test_if_one_rank_cannot_write_no_checkpoint_is_saved(two_ranks, small_run, tmp_path):
    overrides = small_run(
        "deepspeed=zero1", "training.max_steps=6", "training.checkpoint_every=2", "training.keep_last=9"
    )
    assert two_ranks(train_with_a_failing_second_rank, overrides) == [0, 0]
    assert saved_steps(tmp_path / "run") == [2, 6]


@pytest.mark.parametrize("kind", ["deepspeed=zero0", pytest.param("deepspeed=zero3", marks=pytest.mark.slow)])
def test_an_asynchronous_checkpoint_equals_a_synchronous_one(train_run, tmp_path, monkeypatch, kind):
    overrides = (kind, "training.max_steps=12", "training.checkpoint_every=5", "training.keep_last=9")
    at_once = train_run(*overrides, name="at-once")
    reached, write = threading.Event(), saving._write_state
    monkeypatch.setattr(saving, "_write_state", lambda *arguments: (reached.wait(60), write(*arguments))[1])
    step = depthlm.training.trainer.train_step
    steps: list[int] = []

    def counted(*arguments: Any, **settings: Any) -> torch.Tensor:
        # nothing of step 5 is written before step 8 is trained
        steps.append(len(steps) + 1)
        if steps[-1] == 9:
            assert saved_steps(tmp_path / "run") == []
            reached.set()
        return step(*arguments, **settings)

    monkeypatch.setattr("depthlm.training.trainer.train_step", counted)
    run = train_run(*overrides, "training.async_checkpoint=true")
    assert curve(run) == curve(at_once)
    assert saved_steps(run) == saved_steps(at_once) == [5, 10, 12]
    for number in (5, 10):
        assert_same(weights(run, number), weights(at_once, number))
    assert_same(states(run, 5), states(at_once, 5))


def train_by_the_clock_of_the_second_rank(overrides: list[str]) -> int | str:
    """Train, with a checkpoint due after every third step by the clock of rank 1 only."""
    with pytest.MonkeyPatch.context() as patch:
        calls = {"due": 0}

        def due(_: Saver) -> bool:
            calls["due"] += 1
            return torch.distributed.get_rank() == 1 and calls["due"] % 3 == 0

        patch.setattr(Saver, "due", due)
        return train_on_ranks(overrides)


def test_all_ranks_save_when_a_checkpoint_is_due_on_one(two_ranks, small_run, tmp_path):
    overrides = small_run("training.max_steps=8", "training.checkpoint_every=100", "training.keep_last=9",
                          "training.checkpoint_minutes=1")  # fmt: skip
    assert two_ranks(train_by_the_clock_of_the_second_rank, overrides) == [0, 0]
    assert saved_steps(tmp_path / "run") == [3, 6, 8]


def test_a_checkpoint_is_due_checkpoint_minutes_after_the_last(small_run, tmp_path, monkeypatch):
    now = {"seconds": 0.0}
    monkeypatch.setattr(saving.time, "monotonic", lambda: now["seconds"])
    monkeypatch.setattr(saving.torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(Saver, "_start", lambda *_, **__: "no room")
    config = depthlm.compose(small_run("training.checkpoint_minutes=2"))
    saver = Saver(None, tmp_path, config.training, {})
    due = []
    for now["seconds"] in (0.0, 119.0, 120.0, 500.0):
        due.append(saver.due())
    assert due == [False, False, True, True]
    saver.save({"step": 1}, last=False)
    assert not saver.due()


def test_files_of_an_interrupted_save_are_removed_before_the_next_and_when_a_run_resumes(train_run):
    run = RunDirectory(train_run("training.max_steps=6", "training.stop_after=2"))
    # also by a run that has nothing left to save
    for stop in (4, 4):
        (run.staging(17) / "deepspeed").mkdir(parents=True)
        train_run("training.max_steps=6", f"training.stop_after={stop}")
        assert run.leftovers() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_snapshot_of_a_gpu_is_in_pinned_memory():
    weights = torch.randn(3, 1000, device="cuda")
    copy = Snapshot().copy("state", {"weights": weights})["weights"]
    assert copy.is_pinned()
    assert torch.equal(copy, weights.cpu())
