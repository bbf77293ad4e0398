"""Non-finite losses and gradients: batches are skipped, updates rewound, or the run ends, by the policy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import depthlm
from depthlm.data import Batches, open_corpus
from depthlm.runs.manifest import Progress, seal
from depthlm.runs.records import read_metrics
from depthlm.runs.trackers import Trackers
from depthlm.training import FAILED
from depthlm.training.checkpoint import restoring

from .run_files import assert_same, assert_same_run, bad_batches, curve, manifest, states, weights
from .spoiled import train_spoiled

KEPT = ("training.max_steps=12", "training.keep_last=20")


def test_a_bad_batch_is_skipped_listed_logged_with_its_windows_and_raises_an_alert(
    small_run, tmp_path, monkeypatch, capsys
):
    alerts: list[tuple[str, str, int]] = []
    monkeypatch.setattr(Trackers, "alert", lambda self, *alert: alerts.append(alert))
    overrides = small_run(*KEPT, "training.max_steps=7", "training.checkpoint_every=1", "training.batch_size=10")
    assert train_spoiled(overrides, {4: "gradient", 6: "loss"}) == 0
    run = tmp_path / "run"
    for step in range(2, 8):
        before, after = weights(run, step - 1), weights(run, step)
        assert all(torch.equal(before[name], after[name]) for name in before) == (step in (4, 6)), step
    assert (manifest(run)["skipped"], manifest(run)["tokens"]) == ([4, 6], 7 * 320)
    rows = list(read_metrics(run / "metrics.jsonl"))
    assert [row["step"] for row in rows if row["grad_norm"] is None] == [4, 6]
    assert [row["step"] for row in rows if row["loss"] is None] == [6]
    # a skipped update does not advance the schedule
    assert rows[4]["learning_rate"] == rows[3]["learning_rate"]
    config = depthlm.compose(overrides)
    batches = Batches(open_corpus(config.data).train, sequence_length=32, batch_size=10, seed=config.seed)
    windows = {step: batches.samples(step - 1)[1].tolist() for step in (4, 6)}
    bad = bad_batches(run)
    assert [(row["step"], row["outcome"], row["samples"]) for row in bad] == [
        (step, "skipped", {"local": windows[step]}) for step in (4, 6)
    ]
    assert bad[0]["loss"] > 0
    assert (bad[0]["grad_norm"], bad[1]["loss"], bad[1]["grad_norm"]) == (None, None, None)
    output = capsys.readouterr().out
    assert "step 4 skipped: the norm of its gradient is not finite; its batch is in bad_batches.jsonl" in output
    assert "step 6 skipped: its loss is not finite; its batch is in bad_batches.jsonl" in output
    assert alerts[1] == ("bad batch", "skipped: its loss is not finite", 6)


def test_stop_ends_the_run_and_skip_resumes_it(small_run, tmp_path, capsys):
    overrides, spoiled = [*KEPT, "training.checkpoint_every=3", "training.max_steps=7"], {5: "loss"}
    stopped = small_run(*overrides, "training.on_nonfinite=stop")
    assert train_spoiled(stopped, spoiled) == FAILED
    output = capsys.readouterr().out
    assert "step 5 ends the run: its loss is not finite; its batch is in bad_batches.jsonl" in output
    advice = f"the same command with training.on_nonfinite=skip output_dir={tmp_path}/run resumes from the last"
    assert advice in output
    assert [(row["step"], row["outcome"]) for row in bad_batches(tmp_path / "run")] == [(5, "ends the run")]

    assert train_spoiled(small_run(*overrides), spoiled) == 0
    assert train_spoiled(small_run(*overrides, name="skipping"), spoiled) == 0
    assert_same_run(tmp_path / "run", tmp_path / "skipping")
    assert bad_batches(tmp_path / "run") == bad_batches(tmp_path / "skipping")


REWIND = ("training.on_nonfinite=rewind", "training.checkpoint_every=5", *KEPT)


def by_hand(directory: Path, step: int) -> None:
    """Make the checkpoint of step 5 that of a later step, with the batches between them skipped."""
    skipped = list(range(6, step + 1))
    changed = {"step": step, "tokens": step * 128, "skipped": skipped, "rewound": [[5, step]]}
    old = directory / "checkpoints/step-00000005"
    (old / "manifest.json").write_text(json.dumps(seal(manifest(directory, 5) | changed)))
    old.rename(old.with_name(f"step-{step:08d}"))


@pytest.mark.parametrize(
    ("stage", "precision"), [("zero0", "fp32"), pytest.param("zero3", "bf16", marks=pytest.mark.slow)]
)
def test_a_rewound_run_equals_one_resumed_from_the_checkpoint(train_run, small_run, tmp_path, stage, precision):
    overrides = [*REWIND, f"deepspeed={stage}", f"precision={precision}", "training.micro_batch_size=2"]
    assert train_spoiled(small_run(*overrides), {8: "gradient"}) == 0
    by_hand(train_run(*overrides, "training.stop_after=5", name="hand"), 8)
    run, hand = tmp_path / "run", train_run(*overrides, name="hand")
    assert curve(run)[8:] == curve(hand)[5:]
    assert_same(weights(run), weights(hand))
    assert_same(states(run), states(hand))
    manifests = [
        {name: manifest(folder)[name] for name in ("skipped", "rewound", "recent_losses")} for folder in (run, hand)
    ]
    assert manifests[0] == manifests[1]
    assert manifests[0]["skipped"] == [6, 7, 8]
    assert bad_batches(run)[0]["outcome"] == "skipped with all steps since step 5"


@pytest.mark.parametrize(
    ("policy", "spoiled", "kept"),
    [
        ("skip", {2: "gradient", 3: "gradient", 6: "loss"}, {1: [1], 4: [4], 5: [5], 8: [7, 8]}),
        # the update of step 6 is undone
        ("rewind", {7: "gradient"}, {1: [1], 4: [2, 3, 4], 8: [8]}),
    ],
)
def test_the_mean_loss_has_only_the_updates_that_are_kept(small_run, tmp_path, policy, spoiled, kept):
    given = (*REWIND, f"training.on_nonfinite={policy}", "training.max_steps=8")
    for name, every in (("each", 1), ("intervals", 4)):
        assert train_spoiled(small_run(*given, f"training.log_every={every}", name=name), spoiled) == 0
    each, rows = (
        {row["step"]: row for row in read_metrics(tmp_path / name / "metrics.jsonl")} for name in ("each", "intervals")
    )
    assert [step for step, row in each.items() if row["mean_loss"] is None] == list(spoiled)
    for step, steps in kept.items():
        mean = sum(each[kept_step]["loss"] for kept_step in steps) / len(steps)
        assert rows[step]["mean_loss"] == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("stage", ["zero0", pytest.param("zero1", marks=pytest.mark.slow)])
def test_a_rewound_run_that_is_stopped_or_killed_equals_an_uninterrupted_one(small_run, tmp_path, stage):
    # before the first checkpoint; two rewinds to step 5; and at the step of a checkpoint
    spoiled = {2: "loss", 8: "gradient", 9: "loss", 15: "gradient"}
    overrides = [*REWIND, f"deepspeed={stage}", "training.max_steps=17"]
    assert train_spoiled(small_run(*overrides, name="straight"), spoiled) == 0
    for step in (7, 8):
        assert train_spoiled(small_run(*overrides, f"training.stop_after={step}"), spoiled) == 0
    for step in (10, 16):
        assert train_spoiled(small_run(*overrides), spoiled, killed_at=step) == "killed"
    assert train_spoiled(small_run(*overrides), spoiled) == 0
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert curve(run)[-1][0] == 17
    assert_same(weights(run), weights(straight))
    assert_same(states(run), states(straight))
    manifests = [
        {**manifest(folder), **dict.fromkeys(("wall_seconds", "config", "files", "row", "sha256"))}
        for folder in (run, straight)
    ]
    assert manifests[0] == manifests[1]
    assert manifests[0]["skipped"] == [2, 6, 7, 8, 9, 11, 12, 13, 14, 15]
    assert manifests[0]["rewound"] == [[5, 8], [5, 9], [10, 15]]
    assert bad_batches(run) == bad_batches(straight)
    outcomes = [row["outcome"] for row in bad_batches(run)]
    assert outcomes[0].startswith("skipped (no regular checkpoint")
    assert outcomes[1:] == [f"skipped with all steps since step {step}" for step in (5, 5, 10)]


def test_a_rewind_waits_for_the_checkpoint_that_is_being_written(small_run, tmp_path):
    given = (*REWIND, "training.max_steps=7")
    assert train_spoiled(small_run(*given, name="waiting"), {6: "gradient"}) == 0
    assert train_spoiled(small_run(*given, "training.async_checkpoint=true"), {6: "gradient"}) == 0
    assert manifest(tmp_path / "run")["rewound"] == [[5, 6]]
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "waiting"))


def test_without_its_checkpoint_a_run_skips_only_the_bad_batch(small_run, tmp_path, monkeypatch, capsys):
    read = restoring.read_manifest

    def damage(path: Path) -> dict[str, Any]:
        (path / "model.safetensors").write_bytes(b"torn")
        return read(path)

    monkeypatch.setattr(restoring, "read_manifest", damage)
    assert train_spoiled(small_run(*REWIND), {8: "gradient"}) == 0
    assert (manifest(tmp_path / "run")["skipped"], manifest(tmp_path / "run")["rewound"]) == ([8], [])
    output = capsys.readouterr().out
    assert "cannot rewind to step 5: " in output
    assert "model.safetensors is not what was saved" in output
    assert "step 8 skipped without a rewind: the norm of its gradient is not finite" in output


def test_too_many_bad_batches_in_a_row_end_the_run_whether_or_not_it_was_resumed(small_run, capsys):
    limited = [*REWIND, "training.max_skipped=2"]
    # the good batch of step 9 is undone
    spoiled = {1: "loss", 7: "loss", 8: "gradient", 10: "loss"}
    assert train_spoiled(small_run(*limited, "training.stop_after=8"), spoiled) == 0
    capsys.readouterr()
    assert train_spoiled(small_run(*limited), spoiled) == FAILED
    output = capsys.readouterr().out
    assert "3 bad batches in a row, the last at step 10: its loss is not finite" in output
    assert "training.max_skipped=2" in output


def test_bad_batches_count_in_a_row_without_overflows_and_with_each_rewind_as_one():
    for progress, count in (
        (Progress(step=9, skipped=[3, 5, 7, 8, 9]), 3),
        (Progress(step=9, skipped=[6, 7, 8, 9], overflows=[6, 8]), 2),
        (Progress(step=9, skipped=[6, 7, 8, 9], rewound=[[5, 8]]), 2),
    ):
        assert progress.bad_in_a_row() == count, progress


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("deepspeed=zero0", "skip"),
        pytest.param("deepspeed=zero3", "rewind", marks=pytest.mark.slow),
        pytest.param("deepspeed=zero2 precision=bf16 training.micro_batch_size=1", "rewind", marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_is_bad_on_one_rank_is_bad_on_both(two_ranks, small_run, tmp_path, kind, policy):
    overrides = [*REWIND, *kind.split(), f"training.on_nonfinite={policy}", "training.max_steps=14"]
    # a gradient before the reduction reaches both ranks by itself, one after it must be reported
    for name, bad, ranks in (("one", "reduced", (1,)), ("both", "gradient", (0, 1))):
        spoiled = {8: bad, 9: "loss", 12: "loss"}
        assert two_ranks(train_spoiled, small_run(*overrides, name=name), spoiled, ranks) == [0, 0]
    one, both = tmp_path / "one", tmp_path / "both"
    # the loss is logged as infinite only where the loss itself is bad
    assert_same_run(one, both)
    assert manifest(one)["rewound"] == {"skip": [], "rewind": [[5, 8], [5, 9], [10, 12]]}[policy]
    assert manifest(one)["skipped"] == ([8, 9, 12] if policy == "skip" else [6, 7, 8, 9, 11, 12])
    rows = bad_batches(one)
    assert [row["step"] for row in rows] == [8, 9, 12]
    assert [len(row["samples"]["local"]) for row in rows] == [4, 4, 4]
    assert rows[0]["grad_norm"] is None
