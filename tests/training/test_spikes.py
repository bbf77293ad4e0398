"""Spikes of the loss: which losses are some, and what happens to their batches."""

from depthlm.config.schema import Training
from depthlm.files import read_json
from depthlm.runs.records import read_metrics
from depthlm.training.nonfinite import spike_limit

from .run_files import assert_same, bad_batches, curve, manifest, weights
from .spoiled import train_spoiled
from .test_nonfinite import KEPT


def test_a_spike_needs_half_a_window_of_losses():
    training = Training(spike_window=6, spike_deviations=2.0)
    assert spike_limit(training, [4.0, 6.0], 100) == float("inf")
    assert spike_limit(training, [4.0, 5.0, 6.0], 100) == 700
    training = Training(spike_window=6, spike_deviations=None)
    assert spike_limit(training, [4.0, 5.0, 6.0], 100) == float("inf")


SPIKES = ("training.spike_window=4", "training.checkpoint_every=5", *KEPT)


def test_a_spike_is_logged_and_kept(small_run, tmp_path, capsys):
    overrides = [*SPIKES, "training.spike_deviations=20", "training.max_steps=10"]
    # the first comes before there is a mean
    assert train_spoiled(small_run(*overrides), {1: "spike", 9: "spike"}) == 0
    assert train_spoiled(small_run(*overrides, name="plain"), {}) == 0
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "plain"))
    [row] = bad_batches(tmp_path / "run")
    assert (row["step"], row["outcome"]) == (9, "kept")
    assert [read_json(tmp_path / name / "summary.json")["spikes"] for name in ("run", "plain")] == [1, 0]
    assert row["grad_norm"] > 0
    assert bad_batches(tmp_path / "plain") == []
    losses = [values[2] for values in curve(tmp_path / "plain")]
    output = capsys.readouterr().out
    assert f"step 9 kept: its loss {row['loss']:.2f} is a spike: " in output
    assert f"standard deviations above the mean {sum(losses[4:8]) / 4:.2f}; its batch is in bad_batches.jsonl" in output
    recent = manifest(tmp_path / "run")["recent_losses"]
    assert recent == [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl")][-4:]


def test_a_spike_is_skipped_whatever_the_policy_for_non_finite_values(small_run, tmp_path):
    overrides = [*SPIKES, "training.on_spike=skip", "training.spike_deviations=20", "training.max_steps=10"]
    assert train_spoiled(small_run(*overrides, "training.on_nonfinite=stop"), {8: "spike", 9: "spike"}) == 0
    assert train_spoiled(small_run(*overrides, name="bad"), {8: "gradient", 9: "loss"}) == 0
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "bad"))
    assert manifest(tmp_path / "run")["skipped"] == [8, 9]
    assert manifest(tmp_path / "run")["recent_losses"] == manifest(tmp_path / "bad")["recent_losses"]
    assert [row["outcome"] for row in bad_batches(tmp_path / "run")] == ["skipped"] * 2


def test_a_resumed_run_takes_the_same_losses_for_spikes(train_run):
    # it hardly learns, and the limit is so low that some losses exceed it
    overrides = [*SPIKES, "training.on_spike=skip", "training.spike_deviations=0.7", "training.max_steps=20",
                 "optimizer.lr=1e-6"]  # fmt: skip
    straight = train_run(*overrides, name="straight")
    run = train_run(*overrides, stops=(11, 20))
    assert curve(run) == curve(straight)
    assert bad_batches(run) == bad_batches(straight)
    skipped = manifest(straight)["skipped"]
    assert [read_json(folder / "summary.json")["spikes"] for folder in (run, straight)] == [len(skipped)] * 2
    assert 2 < len(skipped) < 15
    assert min(skipped) < 11 < max(skipped)
