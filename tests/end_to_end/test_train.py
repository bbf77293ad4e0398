"""train.py from the command line: trained, interrupted, killed, repeated and swept, on one rank and on two."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from depthlm.locations import REPOSITORY
from depthlm.runs.records import read_metrics

TRAIN = [sys.executable, "train.py"]
Overrides = Callable[..., list[str]]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400, env={**os.environ, **environment}
    )


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def curve(directory: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(directory / "metrics.jsonl")}


def wait_for_step(directory: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while max(curve(directory), default=0) < step:
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_writes_the_documented_files(small_run: Overrides, tmp_path: Path) -> None:
    command = [*TRAIN, *small_run("training.validate_every=10", "training.sample='the depth'")]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"traceback|error|warning", done.stderr, re.IGNORECASE), done.stderr
    directory = tmp_path / "run"
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "train.log", "summary.json", "loss.png"):
        assert (directory / name).stat().st_size > 0
    assert (directory / "checkpoints/latest").read_text() == "step-00000020\n"
    rows = list(read_metrics(directory / "metrics.jsonl"))
    names = {"step", "tokens", "loss", "learning_rate", "grad_norm", "loss_scale", "tokens_per_second", "mfu",
             "peak_memory_gib"}  # fmt: skip
    assert all(names <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "validation/local/loss" in row] == [10, 20]
    summary = json.loads((directory / "summary.json").read_text())
    assert {"parameters", "tokens", "validation_loss", "validation_perplexity", "tokens_per_second", "mfu",
            "wall_seconds", "peak_memory_gib"} <= summary.keys()  # fmt: skip
    assert summary["tokens"] == 20 * 4 * 32
    assert "the depth" in done.stdout.split("a sample:")[1]
    again = run(command)
    assert again.returncode == 0
    assert "This run is complete" in again.stdout


def test_ctrl_c_saves_and_prints_how_to_resume(small_run: Overrides, tmp_path: Path) -> None:
    overrides = small_run("training.max_steps=400", "training.checkpoint_every=1000")
    process = start([*TRAIN, *overrides])
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "run the same command again to resume from there" in output
    stopped_at = max(curve(tmp_path / "run"))
    assert (tmp_path / f"run/checkpoints/step-{stopped_at:08d}/manifest.json").exists()
    assert run([*TRAIN, *overrides]).returncode == 0
    assert (
        run([*TRAIN, *small_run(*overrides, name="undisturbed"), f"output_dir={tmp_path}/undisturbed"]).returncode == 0
    )
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")


def test_a_second_signal_stops_at_once(small_run: Overrides, tmp_path: Path) -> None:
    process = start([*TRAIN, *small_run("training.max_steps=100000", "size.num_layers=40", "training.batch_size=256")])
    wait_for_step(tmp_path / "run", 1, process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output


def test_a_sweep_trains_each_point_once(small_run: Overrides, tmp_path: Path) -> None:
    interpolated = f"output_dir={tmp_path}/sweep/seed-${{seed}}"
    command = [*TRAIN, "-m", *small_run("training.max_steps=3"), "seed=1,2", interpolated]
    done = run([argument for argument in command if argument != f"output_dir={tmp_path}/run"])
    assert done.returncode == 0, done.stderr
    curves = [curve(tmp_path / "sweep" / f"seed-{seed}") for seed in (1, 2)]
    assert curves[0].keys() == curves[1].keys() == {1, 2, 3}
    assert curves[0] != curves[1]
    again = run([argument for argument in command if argument != f"output_dir={tmp_path}/run"])
    assert again.returncode == 0
    assert again.stdout.count("This run is complete") == 2


def test_a_dry_run_takes_one_step_and_writes_nothing(small_run: Overrides, tmp_path: Path) -> None:
    done = run([*TRAIN, *small_run("dry_run=true")])
    assert done.returncode == 0, done.stderr
    assert "peak memory" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_profile_writes_a_trace(small_run: Overrides, tmp_path: Path) -> None:
    done = run([*TRAIN, *small_run("training.max_steps=6", "training.profile=true")])
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "run/profile/trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert any("scaled_dot_product" in str(name) for name in names)


@pytest.mark.slow
def test_a_profile_reports_that_a_run_is_too_short(small_run: Overrides) -> None:
    done = run([*TRAIN, *small_run("training.max_steps=4", "training.profile=true", name="four")])
    assert done.returncode == 0, done.stderr
    assert "trace of 2 steps" in done.stdout
    done = run([*TRAIN, *small_run("training.max_steps=2", "training.profile=true", name="two")])
    assert done.returncode == 0, done.stderr
    assert "no trace" in done.stdout


def test_a_signal_to_the_process_group_does_not_stop_the_data_workers(small_run: Overrides, tmp_path: Path) -> None:
    process = start([*TRAIN, *small_run("training.max_steps=3000", "data.num_workers=1")])
    wait_for_step(tmp_path / "run", 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output


@pytest.mark.slow
def test_two_ranks_train_the_same_run_as_one(small_run: Overrides, tmp_path: Path) -> None:
    alone = run([*TRAIN, *small_run("training.max_steps=8", name="one")])
    assert alone.returncode == 0, alone.stderr
    for stage in (0, 1):
        overrides = small_run("training.max_steps=8", f"deepspeed=zero{stage}", name=f"two-{stage}")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py"]
        both = run([*launch, *overrides], OMP_NUM_THREADS="1")
        assert both.returncode == 0, both.stderr
        assert curve(tmp_path / f"two-{stage}") == pytest.approx(curve(tmp_path / "one"), rel=1e-5)
    in_bf16 = small_run("training.max_steps=8", "precision=bf16", name="two-bf16")
    assert run([*launch, *in_bf16], OMP_NUM_THREADS="1").returncode == 0
    assert curve(tmp_path / "two-bf16") == pytest.approx(curve(tmp_path / "one"), rel=5e-3)
    overrides = small_run("training.max_steps=8", name="two-then-one")
    assert run([*launch, *overrides, "training.stop_after=4"], OMP_NUM_THREADS="1").returncode == 0
    assert run([*TRAIN, *overrides]).returncode == 0
    assert curve(tmp_path / "two-then-one") == pytest.approx(curve(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_two_ranks_with_zero_3_train_validate_sample_and_save_the_same_run_as_one(
    small_run: Overrides, tmp_path: Path
) -> None:
    # of five windows rank 0 has three, hence two batches of at most two, and rank 1 has two, hence one
    shared = ("model=dca", "training.max_steps=6", "training.validation_tokens=161", "training.sample=depth")
    alone = run([*TRAIN, *small_run(*shared, name="one")])
    assert alone.returncode == 0, alone.stderr
    overrides = small_run(*shared, "deepspeed=zero3", "training.activation_checkpointing=true", name="two")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py"]
    both = run([*launch, *overrides], OMP_NUM_THREADS="1")
    assert both.returncode == 0, both.stderr
    assert not re.search(r"traceback|error|warning", both.stderr, re.IGNORECASE), both.stderr
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-5)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert summaries[0]["validation_loss"] == pytest.approx(summaries[1]["validation_loss"], rel=1e-5)
    assert summaries[0]["parameters"] == summaries[1]["parameters"]
    one, two = (load_file(tmp_path / name / "checkpoints/step-00000006/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.dist(two[name], one[name]) <= 1e-3 * one[name].norm() + 1e-3 for name in one)
    assert both.stdout.count("a sample:") == 1
    assert "depth" in both.stdout.split("a sample:")[1]


def test_wandb_offline_logs_the_run_and_the_run_id_is_in_the_checkpoint(small_run: Overrides, tmp_path: Path) -> None:
    done = run([*TRAIN, *small_run("training.max_steps=3", "tracker=wandb")], WANDB_API_KEY="", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000003/manifest.json").read_text())
    assert list((tmp_path / "run/wandb").glob(f"offline-run-*-{manifest['wandb_id']}"))
    assert "wandb sync" in done.stdout
    assert "W&B did not" not in done.stdout
    assert "Traceback" not in done.stderr
