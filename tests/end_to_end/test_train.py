"""train.py from the command line: trained, interrupted and repeated."""

import json
import re
import signal
import time
from pathlib import Path

import depthlm
from depthlm.runs.records import read_metrics
from depthlm.training import train

from ..forks import Forked

TRAIN = ["train.py"]


def curve(directory: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(directory / "metrics.jsonl")}


def wait_for_step(directory: Path, step: int, process: Forked) -> None:
    deadline = time.monotonic() + 120
    while max(curve(directory), default=0) < step:
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_writes_the_documented_files(small_run, tmp_path, forks):
    command = [*TRAIN, *small_run("training.max_steps=4", "training.validate_every=2", "training.sample='the depth'")]
    done = forks.run(command)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"traceback|error|warning", done.stderr, re.IGNORECASE), done.stderr
    directory = tmp_path / "run"
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "train.log", "summary.json", "loss.png"):
        assert (directory / name).stat().st_size > 0
    assert (directory / "checkpoints/latest").read_text() == "step-00000004\n"
    rows = list(read_metrics(directory / "metrics.jsonl"))
    names = {"step", "tokens", "loss", "mean_loss", "interval_updates", "learning_rate", "grad_norm", "loss_scale",
             "tokens_per_second", "mfu", "data_seconds", "peak_memory_gib"}  # fmt: skip
    assert all(names <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "validation/local/loss" in row] == [2, 4]
    summary = json.loads((directory / "summary.json").read_text())
    assert {"parameters", "tokens", "validation_loss", "validation_perplexity", "tokens_per_second", "mfu",
            "wall_seconds", "peak_memory_gib"} <= summary.keys()  # fmt: skip
    assert summary["tokens"] == 4 * 4 * 32
    assert "the depth" in done.stdout.split("a sample:")[1]
    again = forks.run(command)
    assert again.returncode == 0
    assert "This run is complete" in again.stdout


def test_ctrl_c_saves_and_prints_how_to_resume(small_run, tmp_path, forks):
    overrides = ("training.max_steps=100000", "training.checkpoint_every=100000")
    process = forks.start([*TRAIN, *small_run(*overrides)])
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "the same command resumes from there" in output
    stopped_at = max(curve(tmp_path / "run"))
    assert (tmp_path / f"run/checkpoints/step-{stopped_at:08d}/manifest.json").exists()
    for name in ("run", "undisturbed"):
        overrides = (*overrides[:2], f"training.stop_after={stopped_at + 5}")
        assert train(depthlm.compose(small_run(*overrides, name=name))) == 0
    assert curve(tmp_path / "run").keys() == {*range(1, stopped_at + 6)}
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")


def test_a_dry_run_takes_one_step_and_writes_nothing(small_run, tmp_path, capsys):
    assert train(depthlm.compose(small_run("dry_run=true", "price=2.5"))) == 0
    printed = capsys.readouterr().out
    assert "peak memory" in printed
    assert re.search(r"whole run +about \d+ s of steps +\n", printed)
    assumption = "in bf16 on H100 GPUs at 39.9% of their 989 TFLOP/s, as vanilla reached"
    assert re.search(rf"GPU hours +< 0.01 {assumption}", printed)
    assert re.search(r"cost +< \$0.01 at \$2.50 per GPU hour +\n", printed)
    assert not (tmp_path / "run").exists()


def test_a_profile_writes_a_trace(small_run, tmp_path, capsys):
    assert train(depthlm.compose(small_run("training.max_steps=4", "training.profile=true"))) == 0
    assert "trace of 2 steps" in capsys.readouterr().out
    trace = json.loads((tmp_path / "run/profile/trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert any("scaled_dot_product" in str(name) for name in names)
