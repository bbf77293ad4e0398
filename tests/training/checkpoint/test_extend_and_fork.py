"""Runs resumed with another length, number of ranks or ZeRO stage, and forked runs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import depthlm
from depthlm.errors import UserError
from depthlm.runs.records import read_metrics
from depthlm.training import train

from ...two_ranks import TwoRanks, train_on_ranks
from ..run_files import curve, weights

Overrides = Callable[..., list[str]]


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "before"),
    [(0, "fp32", 2), (1, "bf16", 2), (2, "fp32", 2), (3, "fp32", 1), (3, "bf16", 2)],
)
def test_a_run_resumes_on_another_number_of_ranks_and_back(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, stage: int, precision: str, before: int
) -> None:
    def go(world_size: int, *more: str, name: str) -> None:
        overrides = small_run(f"deepspeed=zero{stage}", f"precision={precision}", "training.max_steps=9",
                              "optimizer.weight_decay=1.0", *more, name=name)  # fmt: skip
        if world_size == 2:
            assert two_ranks(train_on_ranks, overrides) == [0, 0]
        else:
            assert train(depthlm.compose(overrides)) == 0

    go(before, name="undisturbed")
    go(before, "training.stop_after=3", name="moved")
    go(3 - before, "training.stop_after=6", name="moved")
    go(before, name="moved")
    log = (tmp_path / "moved/train.log").read_text()
    assert ("repartitioned" in log) == (stage > 0)
    tolerance = 2e-6 if precision == "fp32" else 3e-4
    torch.testing.assert_close(losses(tmp_path / "moved"), losses(tmp_path / "undisturbed"), rtol=tolerance, atol=0)
    one, other = (weights(tmp_path / name) for name in ("moved", "undisturbed"))
    assert all(torch.dist(one[name].float(), other[name].float()) <= 3e-3 * other[name].float().norm() for name in one)
    assert not list((tmp_path / "moved/checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("world_size", "precision"),
    [(1, "bf16"), *(pytest.param(2, precision, marks=pytest.mark.slow) for precision in ("fp32", "bf16"))],
)
def test_zero_1_resumes_as_zero_2_and_back(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, world_size: int, precision: str
) -> None:
    for name, stages in (("undisturbed", [1]), ("moved", [1, 2, 1])):
        for number, stage in enumerate(stages, 1):
            overrides = small_run(f"deepspeed=zero{stage}", f"precision={precision}", "training.max_steps=9",
                                  f"training.stop_after={9 * number // len(stages)}", name=name)  # fmt: skip
            if world_size == 2:
                assert two_ranks(train_on_ranks, overrides) == [0, 0]
            else:
                assert train(depthlm.compose(overrides)) == 0
    assert "deepspeed.stage: the run has 1, this command gives 2" in (tmp_path / "moved/train.log").read_text()
    tolerance = 2e-6 if precision == "fp32" else 3e-4
    torch.testing.assert_close(losses(tmp_path / "moved"), losses(tmp_path / "undisturbed"), rtol=tolerance, atol=0)


@pytest.mark.slow
def test_zero_1_on_two_ranks_resumes_as_zero_2_on_one(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path
) -> None:
    shared = ("training.max_steps=6", "training.stop_after=3")
    assert two_ranks(train_on_ranks, small_run(*shared, "deepspeed=zero1")) == [0, 0]
    assert train(depthlm.compose(small_run("training.max_steps=6", "deepspeed=zero2"))) == 0
    assert train(depthlm.compose(small_run("training.max_steps=6", name="undisturbed"))) == 0
    torch.testing.assert_close(losses(tmp_path / "run"), losses(tmp_path / "undisturbed"), rtol=2e-6, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_run_resumes_on_fewer_ranks(
    two_ranks: TwoRanks, small_run: Overrides, tmp_path: Path, optimizer: str
) -> None:
    shared = ("training.max_steps=4", "deepspeed=zero1", f"optimizer={optimizer}")
    assert two_ranks(train_on_ranks, small_run(*shared, "training.stop_after=2")) == [0, 0]
    assert train(depthlm.compose(small_run(*shared))) == 0
    assert "repartitioned" in (tmp_path / "run/train.log").read_text()
    assert train(depthlm.compose(small_run(*shared, name="undisturbed"))) == 0
    assert len(losses(tmp_path / "run")) == 4
    tolerance = 2e-6 if optimizer == "adamw" else 1e-4
    torch.testing.assert_close(losses(tmp_path / "run"), losses(tmp_path / "undisturbed"), rtol=tolerance, atol=0)
    one, other = (weights(tmp_path / name) for name in ("run", "undisturbed"))
    assert all(torch.dist(one[name], other[name]) <= 3e-3 * other[name].norm() for name in one)


def test_a_complete_run_is_extended_on_request(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = ("schedule=constant", "schedule.warmup_ratio=0")
    assert train(depthlm.compose(small_run(*constant, "training.max_steps=2"))) == 0
    longer = small_run(*constant, "training.max_steps=4")
    with pytest.raises(UserError, match="max_steps: the run has 2, this command gives 4\nresume=extend allows"):
        train(depthlm.compose(longer))
    assert (tmp_path / "run/summary.json").exists()
    for stop in (3, 4, 4):
        assert train(depthlm.compose([*longer, "resume=extend", f"training.stop_after={stop}"])) == 0
    printed = capsys.readouterr().out
    assert printed.count("This run is complete") == 3
    assert printed.count("this run is now 4 steps long; its directory keeps the name run") == 1
    assert train(depthlm.compose(small_run(*constant, "training.max_steps=4", name="straight"))) == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    summaries = [json.loads((tmp_path / "run" / name).read_text())["steps"]
                 for name in ("summary.json", "summary-step-00000002.json")]  # fmt: skip
    assert summaries == [4, 2]
    with pytest.raises(UserError, match="has done 4 steps, more than the 3 of this run"):
        train(depthlm.compose(small_run(*constant, "training.max_steps=3", "resume=extend")))
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        train(depthlm.compose(small_run(*constant, "training.max_steps=5", "optimizer.lr=1", "resume=extend")))


def test_a_fork_continues_from_the_state_with_other_settings(small_run: Overrides, tmp_path: Path) -> None:
    shared = ("training.max_steps=8", "training.checkpoint_every=2", "training.keep_last=9")
    assert train(depthlm.compose(small_run(*shared, name="source"))) == 0
    source = {file: file.read_bytes() for file in (tmp_path / "source").rglob("*") if file.is_file()}
    from_4 = f"fork_from={tmp_path}/source/checkpoints/step-00000004"
    assert train(depthlm.compose(small_run(*shared, from_4, name="same"))) == 0
    assert curve(tmp_path / "same") == curve(tmp_path / "source")[4:]
    other = [*shared, from_4, "optimizer.lr=1e-5", "optimizer.weight_decay=0.5", "training.max_steps=10"]
    assert train(depthlm.compose(small_run(*other, "training.stop_after=6", name="other"))) == 0
    assert train(depthlm.compose(small_run(*other, name="other"))) == 0
    rows = list(read_metrics(tmp_path / "other/metrics.jsonl"))
    assert [row["step"] for row in rows] == [5, 6, 7, 8, 9, 10]
    assert rows[0]["loss"] == curve(tmp_path / "source")[4][2]
    assert all(row["learning_rate"] <= 1e-5 for row in rows)
    log = (tmp_path / "other/train.log").read_text()
    assert "forked with another setting: optimizer.weight_decay: the run has 0.1, this command gives 0.5" in log
    # neither the fork itself nor a tracker that the run did not have is a difference
    assert not re.search("fork_from|wandb|tracker", log)
    assert {file: file.read_bytes() for file in source} == source
    newest = f"fork_from={tmp_path}/source"
    with pytest.raises(UserError, match="has done 8 steps, more than the 6"):
        train(depthlm.compose(small_run(newest, "training.max_steps=6", name="shorter")))
    assert not (tmp_path / "shorter").exists()


def test_the_first_mean_loss_of_a_fork_has_its_own_updates_only(small_run: Overrides, tmp_path: Path) -> None:
    shared = ("training.max_steps=8", "training.checkpoint_every=100", "training.log_every=4")
    assert train(depthlm.compose(small_run(*shared, "training.stop_after=6", name="source"))) == 0
    from_6 = f"fork_from={tmp_path}/source/checkpoints/step-00000006"
    for name, every in (("fork", 4), ("each", 1)):
        assert train(depthlm.compose(small_run(*shared, from_6, f"training.log_every={every}", name=name))) == 0
    rows, each = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("fork", "each"))
    assert [row["step"] for row in each] == [7, 8]
    assert rows[-1]["mean_loss"] == pytest.approx((each[0]["loss"] + each[1]["loss"]) / 2, rel=1e-9)


@pytest.mark.slow
def test_a_forks_optimizer_uses_the_settings_of_the_fork(small_run: Overrides, tmp_path: Path) -> None:
    assert train(depthlm.compose(small_run("training.max_steps=2", name="source"))) == 0
    states = []
    for decay in ("0", "5"):
        overrides = small_run(f"fork_from={tmp_path}/source", "training.max_steps=3", f"optimizer.weight_decay={decay}",
                              "schedule=constant", name=f"decay-{decay}")  # fmt: skip
        assert train(depthlm.compose(overrides)) == 0
        states.append(load_file(tmp_path / f"decay-{decay}/checkpoints/step-00000003/model.safetensors"))
    name = "layers.0.mlp.down_proj.weight"
    assert states[1][name].norm() < 0.99 * states[0][name].norm()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model=mhc", "model.connection"),
        ("size.num_layers=1", "size.num_layers: the run has 2"),
        ("optimizer=muon", "optimizer._target_: the run has torch.optim.AdamW"),
    ],
)
def test_a_fork_that_cannot_use_the_state_is_refused_before_the_model_is_built(
    trained: Callable[..., Path],
    small_run: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    words: str,
) -> None:
    trained("training.max_steps=1", name="source")
    monkeypatch.setattr("depthlm.training.setup.build_model", lambda *_, **__: pytest.fail("something was built"))
    with pytest.raises(UserError, match=rf"(?s){words}.*init_from={tmp_path}/source"):
        train(depthlm.compose(small_run(f"fork_from={tmp_path}/source", change, name="next")))


def test_a_fork_of_a_run_without_a_valid_checkpoint_is_refused(
    trained: Callable[..., Path], small_run: Overrides, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"fork_from=.*nowhere: no checkpoint in it"):
        depthlm.compose(small_run(f"fork_from={tmp_path}/nowhere"))
    file = trained("training.max_steps=1", name="source") / "checkpoints/step-00000001/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"fork_from=.*source: no complete checkpoint in it"):
        train(depthlm.compose(small_run(f"fork_from={tmp_path}/source", name="next")))
    with pytest.raises(UserError, match="both given"):
        depthlm.compose(small_run(f"fork_from={tmp_path}/source", f"init_from={tmp_path}/source", name="next"))


def test_a_complete_run_without_its_checkpoints_warns_and_retrains_on_request(
    small_run: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = small_run("training.max_steps=4", "training.checkpoint_every=2")
    assert train(depthlm.compose(overrides)) == 0
    run = tmp_path / "run"
    before = json.loads((run / "summary.json").read_text())["validation_loss"]
    shutil.rmtree(run / "checkpoints/step-00000004")
    (run / "checkpoints/step-00000002/model.safetensors").write_bytes(b"torn")
    capfd.readouterr()
    assert train(depthlm.compose(overrides)) == 0
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
    assert json.loads((run / "summary.json").read_text())["validation_loss"] == before
    # a second start has nothing to train
    capfd.readouterr()
    assert train(again) == 0
    assert "step 1/4" not in capfd.readouterr().out


def test_a_complete_run_has_no_step_to_profile(trained: Callable[..., Path], small_run: Overrides) -> None:
    trained("training.max_steps=2")
    overrides = small_run("training.max_steps=2")
    with pytest.raises(UserError, match=r"training.profile=true: .* is complete"):
        train(depthlm.compose([*overrides, "training.profile=true"]))
