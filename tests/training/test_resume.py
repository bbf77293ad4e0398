"""A resumed run equals an uninterrupted one bit for bit; run directories that cannot be resumed are refused."""

import fcntl
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import depthlm
from depthlm.data import open_corpus, validation_batches
from depthlm.errors import UserError
from depthlm.files import read_json
from depthlm.losses import total_loss
from depthlm.run_directory import RunDirectory
from depthlm.runs import directory as run_directory
from depthlm.runs.directory import Claim
from depthlm.runs.records import read_metrics
from depthlm.training import run, train
from depthlm.training.monitoring import metrics

from .run_files import assert_same, curve, manifest, states, weights
from .spoiled import train_spoiled


# test_two_ranks has every stage, and test_many_ranks Muon
def test_straight_equals_resumed_bit_for_bit(train_run):
    overrides = ["precision=bf16", "deepspeed=zero3", "model=dca", "model.loops=2",
                 "optimizer.groups.mechanism.lr_scale=0.5", "training.max_steps=6", "training.log_every=4"]  # fmt: skip
    straight, resumed = train_run(*overrides, name="straight"), train_run(*overrides, name="resumed", stops=(3, 6))
    # the mean losses are those of the whole intervals
    assert [row[0] for row in curve(resumed)] == [1, 3, 4, 6]
    assert [row for row in curve(resumed) if row[0] != 3] == curve(straight)
    assert_same(weights(resumed), weights(straight))
    assert_same(states(resumed), states(straight))
    moments = [
        name for name, value in states(straight).items() if "optim" in name and torch.as_tensor(value).numel() > 1
    ]
    assert len(moments) >= 2


def test_repeating_a_complete_run_changes_nothing_and_trains_only_what_is_missing(
    trained, train_run, small_run, capsys
):
    run = trained("training.max_steps=2")
    before = {file: file.stat().st_mtime_ns for file in run.parent.rglob("*")}
    capsys.readouterr()
    train_run("training.max_steps=2")
    printed = capsys.readouterr().out
    assert "This run is complete" in printed
    assert f"python -m depthlm inspect run={run}\n" in printed
    assert {file: file.stat().st_mtime_ns for file in run.parent.rglob("*")} == before
    summary = read_json(run / "summary.json")
    (run / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json cannot be read .*; delete it"):
        train(depthlm.compose(small_run("training.max_steps=2")))
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").unlink()
    train_run("training.max_steps=2")
    assert read_json(run / "summary.json")["validation_loss"] == summary["validation_loss"]


def test_a_configuration_that_differs_or_cannot_be_read_is_refused_and_by_resume_never_any(trained, small_run):
    run = trained("training.stop_after=1")
    with pytest.raises(UserError) as caught:
        train(depthlm.compose(small_run("optimizer.lr=0.5", "seed=9", "training.log_every=7")))
    text = str(caught.value)
    assert "optimizer.lr: the run has 0.00" in text
    assert "seed: the run has 1, this command gives 9" in text
    assert "log_every" not in text
    with pytest.raises(UserError, match="output_dir="):
        train(depthlm.compose(small_run("resume=never")))
    for broken in ("", "seed: [1", None):
        (run / "config.yaml").unlink()
        if broken is not None:
            (run / "config.yaml").write_text(broken)
        with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
            train(depthlm.compose(small_run()))


def test_the_rows_of_a_killed_run_and_the_training_time_in_them_are_those_of_an_undisturbed_one(
    train_run, small_run, monkeypatch
):
    overrides = ["training.max_steps=8", "training.validate_every=2", "training.checkpoint_every=4"]
    runs = []
    for name, killed in (("straight", None), ("killed", 7)):
        # a clock that ticks when it is read, so that every step takes equally long
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=itertools.count(0.0).__next__))
        train_spoiled(small_run(*overrides, name=name), {}, killed_at=killed)
        runs.append(train_run(*overrides, name=name))
    straight, killed_run = runs
    assert curve(killed_run) == curve(straight)
    # the two lost steps are in the time as often as in the rows
    of_killed, times = (
        {row["step"]: row["wall_seconds"] for row in read_metrics(run / "metrics.jsonl") if "wall_seconds" in row}
        for run in (killed_run, straight)
    )
    assert of_killed == times
    assert list(times) == [2, 4, 6, 8]
    assert 0 < times[2] < times[4] < times[6] < times[8]
    assert times[4] == manifest(straight, 4)["wall_seconds"]
    assert times[8] == read_json(straight / "summary.json")["wall_seconds"]


def test_a_run_does_not_resume_on_other_tokens(train_run, small_run, tmp_path):
    overrides = (f"data.source={tmp_path}/source", f"data.path={tmp_path}/mine", "training.checkpoint_every=2")
    (tmp_path / "source").mkdir()
    for text in ("number", "another"):
        for number in range(30):
            (tmp_path / f"source/{number}.txt").write_text(f"{text} {number} " * 30)
        if text == "number":
            train_run(*overrides, "training.stop_after=2")
            shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UserError, match="trained on other tokens"):
        train(depthlm.compose(small_run(*overrides)))


@pytest.mark.parametrize(("before", "refused"), [(0, (1, 3)), pytest.param(3, (0, 2), marks=pytest.mark.slow)])
def test_resuming_at_an_incompatible_stage_is_refused_before_anything_is_built(
    trained, small_run, monkeypatch, before, refused
):
    run = trained(f"deepspeed=zero{before}", "training.stop_after=1")
    monkeypatch.setattr("depthlm.training.setup.build_model", lambda *_, **__: pytest.fail("something was built"))
    for now in refused:
        with pytest.raises(UserError, match=f"ZeRO {before}, .* to ZeRO {now}; .*init_from={run}"):
            train(depthlm.compose(small_run(f"deepspeed=zero{now}")))


def test_two_processes_cannot_train_in_one_directory(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr("depthlm.runs.directory.LOCK_SECONDS", 0.1)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process trains in it"):
            train(depthlm.compose(small_run("training.max_steps=1")))


def test_a_run_resumes_from_what_another_process_saved_while_it_waited_for_the_lock(train_run, monkeypatch):
    overrides = ("training.max_steps=4", "training.checkpoint_every=2")
    lock = run.lock_run_directory

    def late(directory: Path) -> Any:
        # the other process saves and ends while this one waits
        monkeypatch.setattr(run, "lock_run_directory", lock)
        train_run(*overrides, "training.stop_after=3")
        return lock(directory)

    monkeypatch.setattr(run, "lock_run_directory", late)
    resumed = train_run(*overrides)
    assert "resumed from" in (resumed / "train.log").read_text()
    assert [row[0] for row in curve(resumed)] == [1, 2, 3, 4]


def test_a_run_directory_that_ranks_do_not_share_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("depthlm.runs.directory.SHARED_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"rank 3 on .* does not see what rank 0 has written there"):
        run_directory.check_shared(tmp_path / "missing", 3, "mark")
    # as where the node of rank 3 has an older run on a disk of its own
    claims = [Claim(RunDirectory(tmp_path / name)) for name in ("stale", "shared")]
    marks = []
    for claim in claims:
        with run_directory.lock_run_directory(claim):
            marks.append(run_directory.mark_directory(claim))
            (claim.run.path / "config.yaml").touch()
    with pytest.raises(UserError, match=r"rank 3 on .* does not see what rank 0 has written there"):
        run_directory.check_shared(tmp_path / "stale", 3, marks[1])
    run_directory.check_shared(tmp_path / "shared", 3, marks[1])


def test_load_returns_the_newest_weights(train_run, tmp_path):
    run = train_run("training.max_steps=4", "training.checkpoint_every=2", "precision=bf16", "deepspeed=zero3",
                    "model=dca", "model.loops=2")  # fmt: skip
    model, config = depthlm.load(run)
    assert (config.training.max_steps, config.model.loops, model.loops) == (4, 2, 2)
    assert len(model.connections) == 2 * 2 * config.size.num_layers + 1
    saved, older = weights(run, 4), weights(run, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name].to(value.dtype))
    assert any(not torch.equal(saved[name], older[name]) for name in saved)
    summary = read_json(run / "summary.json")
    batches = validation_batches(open_corpus(config.data).validation["local"], 32, 4, config.training.validation_tokens)
    loss = total_loss(model, batches, torch.device("cpu")).mean
    assert loss == pytest.approx(summary["validation_loss"], rel=5e-3)
    assert summary["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(UserError, match="no run in it"):
        depthlm.load(tmp_path / "nowhere")


def test_load_builds_no_foreign_classes(trained):
    run = trained("training.max_steps=1")
    text = (run / "config.yaml").read_text()
    for target, words in (
        ("os.system", "Loading the run imports that code"),
        ("depthlm.model.connection.nn.Module", "cannot be imported"),
        ("depthlm.model.decoder.Decoder", "not a subclass of"),
        ("depthlm.mechanisms.residual.Residual\n    x: {_target_: this.is.never.Imported}", "no such setting"),
    ):
        (run / "config.yaml").write_text(text.replace("depthlm.mechanisms.residual.Residual", target))
        with pytest.raises(UserError, match=words):
            depthlm.load(run)
