"""Runs resumed with another length, number of ranks or ZeRO stage, forked runs, and runs whose checkpoints are gone."""

import re
import shutil

import pytest
import torch

import depthlm
from depthlm.errors import UserError
from depthlm.files import read_json
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.engine import Engine

from ..run_files import curve, losses, manifest, weights


# (ranks, stage) until the run ends; each segment has three steps
@pytest.mark.parametrize(
    ("precision", "segments"),
    [
        ("fp32", [(2, 1), (1, 1)]),
        pytest.param("bf16", [(2, 1), (1, 2), (2, 1)], marks=pytest.mark.slow),
        pytest.param("fp32", [(2, 0), (1, 0), (2, 0)], marks=pytest.mark.slow),
        pytest.param("fp32", [(1, 3), (2, 3), (1, 3)], marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_on_another_number_of_ranks_and_as_zero_1_or_2(train_run, precision, segments):
    given = (f"precision={precision}", f"training.max_steps={3 * len(segments)}", "optimizer.weight_decay=1.0")
    (ranks, stage), *_ = segments
    undisturbed = train_run(*given, f"deepspeed=zero{stage}", ranks=ranks, name="undisturbed")
    for number, (count, stage_now) in enumerate(segments, 1):
        moved = train_run(
            *given, f"deepspeed=zero{stage_now}", f"training.stop_after={3 * number}", ranks=count, name="moved"
        )
    log = (moved / "train.log").read_text()
    assert ("repartitioned" in log) == (stage > 0)
    assert ("deepspeed.stage: the run has 1, this command gives 2" in log) == ((1, 2) in segments)
    tolerance = 2e-6 if precision == "fp32" else 3e-4
    torch.testing.assert_close(losses(moved), losses(undisturbed), rtol=tolerance, atol=0)
    one, other = weights(moved), weights(undisturbed)
    assert all(torch.dist(one[name].float(), other[name].float()) <= 3e-3 * other[name].float().norm() for name in one)
    assert not list((moved / "checkpoints").glob(".*"))


def test_a_complete_run_is_extended_on_request(train_run, small_run, capsys):
    constant = ("schedule=constant", "schedule.warmup_ratio=0")
    run = train_run(*constant, "training.max_steps=2")
    longer = (*constant, "training.max_steps=4")
    with pytest.raises(UserError, match="max_steps: the run has 2, this command gives 4\nresume=extend allows"):
        train(depthlm.compose(small_run(*longer)))
    assert (run / "summary.json").exists()
    train_run(*longer, "resume=extend", stops=(3, 4, 4))
    printed = capsys.readouterr().out
    assert printed.count("This run is complete") == 3
    assert printed.count("this run is now 4 steps long; its directory keeps the name run") == 1
    assert curve(run) == curve(train_run(*longer, name="straight"))
    assert [read_json(run / name)["steps"] for name in ("summary.json", "summary-step-00000002.json")] == [4, 2]
    for other, words in (
        ("training.max_steps=3", "has done 4 steps, and this run has 3 in all"), ("optimizer.lr=1", r"optimizer\.lr"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            train(depthlm.compose(small_run(*longer, other, "resume=extend")))


def test_a_fork_continues_from_the_state_with_other_settings(train_run, small_run, tmp_path):
    shared = ("training.max_steps=8", "training.checkpoint_every=2", "training.keep_last=9")
    source = train_run(*shared, name="source")
    before = {file: file.read_bytes() for file in source.rglob("*") if file.is_file()}
    from_4 = f"fork_from={source}/checkpoints/step-00000004"
    assert curve(train_run(*shared, from_4, name="same")) == curve(source)[4:]
    other = (*shared, from_4, "optimizer.lr=1e-5", "optimizer.weight_decay=0.5", "training.max_steps=10")
    fork = train_run(*other, name="other", stops=(6, 10))
    rows = list(read_metrics(fork / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [5, 6, 7, 8, 9, 10]
    # what a spike is depends on the losses of the fork alone
    assert len(manifest(fork)["recent_losses"]) == 6
    assert rows[0]["loss"] == curve(source)[4][2]
    assert all(row["learning_rate"] <= 1e-5 for row in rows)
    log = (fork / "train.log").read_text()
    assert "forked with another setting: optimizer.weight_decay: the run has 0.1, this command gives 0.5" in log
    # neither the fork itself nor a tracker that the run did not have is a difference
    assert not re.search("fork_from|wandb|tracker", log)
    assert {file: file.read_bytes() for file in before} == before
    for steps in (6, 8):
        with pytest.raises(UserError, match=f"has done 8 steps, and this run has {steps} in all"):
            train(depthlm.compose(small_run(f"fork_from={source}", f"training.max_steps={steps}", name="no-longer")))
    assert not (tmp_path / "no-longer").exists()


def test_a_fork_clips_gradients_as_its_own_settings_say(train_run, monkeypatch):
    source = train_run("deepspeed=zero1", "training.max_steps=1", "training.gradient_clipping=1", name="source")
    load, clipped = Engine.load_state, []
    monkeypatch.setattr(
        Engine, "load_state", lambda self, *arguments: (load(self, *arguments), clipped.append(self.zero.clip_grad))
    )
    train_run("deepspeed=zero1", "training.max_steps=2", "training.gradient_clipping=0.1", f"fork_from={source}")
    assert clipped == [0.1]


def test_a_fork_that_cannot_use_the_state_or_has_no_valid_checkpoint_is_refused_before_the_model_is_built(
    trained, small_run, tmp_path, monkeypatch
):
    source = trained("training.max_steps=1", name="source")
    fork = f"fork_from={source}"
    monkeypatch.setattr("depthlm.training.setup.build_model", lambda *_, **__: pytest.fail("something was built"))
    for change, words in (
        ("model=mhc", "model.connection"),
        ("size.num_layers=1", "size.num_layers: the run has 2"),
        ("optimizer=muon", "optimizer._target_: the run has torch.optim.AdamW"),
        ("+optimizer.settings.amsgrad=true", "optimizer.settings.amsgrad"),
        ("optimizer.groups.embedding.weight_decay=0", "its optimizer has other groups of parameters"),
    ):
        with pytest.raises(UserError, match=rf"(?s){words}.*init_from={source}"):
            train(depthlm.compose(small_run(fork, change, name="next")))
    length = ("training.max_steps=null", "training.max_tokens=1M", "training.batch_size=64")
    with pytest.raises(UserError, match=r"its steps have \d+ tokens, .* give training.max_steps"):
        train(depthlm.compose(small_run(fork, *length, name="next")))
    for given, words in (
        ([f"fork_from={tmp_path}/nowhere"], r"fork_from=.*nowhere: no checkpoint in it"),
        ([fork, f"init_from={source}"], "both given"),
    ):
        with pytest.raises(UserError, match=words):
            depthlm.compose(small_run(*given, name="next"))
    file = source / "checkpoints/step-00000001/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"fork_from=.*source: no complete checkpoint in it"):
        train(depthlm.compose(small_run(fork, name="next")))


def test_a_complete_run_without_its_checkpoints_warns_and_retrains_on_request(train_run, capfd):
    overrides = ("training.max_steps=4", "training.checkpoint_every=2")
    run = train_run(*overrides)
    before = read_json(run / "summary.json")["validation_loss"]
    shutil.rmtree(run / "checkpoints/step-00000004")
    (run / "checkpoints/step-00000002/model.safetensors").write_bytes(b"torn")
    capfd.readouterr()
    train_run(*overrides)
    output = capfd.readouterr().out
    assert "This run was complete, and its last checkpoint is lost" in output
    assert "step-00000004 is missing" in output
    assert "resume=retrain" in output
    with pytest.raises(UserError, match=r"step-00000002: model.safetensors .* run=.* resume=retrain"):
        depthlm.load(run)
    again = depthlm.compose([f"run={run}", "resume=retrain"])
    assert again.output_dir == str(run)
    assert train(again) == 0
    depthlm.load(run)
    assert read_json(run / "summary.json")["validation_loss"] == before
    # it was not extended
    assert [path.name for path in run.glob("summary-*")] == ["summary-lost-00000004.json"]
    assert RunDirectory(run).extended_at() == []
    # a second start has nothing to train
    capfd.readouterr()
    assert train(again) == 0
    assert "step 1/4" not in capfd.readouterr().out
