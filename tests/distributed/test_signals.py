"""Signals to a run: before its first step, in a long step, in a validation, and when the terminal closes.

They reach their thread, previous handlers are restored afterwards, and Ctrl-C prints one line.
"""

import os
import pty
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from depthlm.config import compose
from depthlm.distributed.signals import on_signals
from depthlm.locations import REPOSITORY
from depthlm.runs.checkpoints import read_manifest
from depthlm.runs.records import read_metrics
from depthlm.training import train, validation
from depthlm.training.checkpoint.saving import Saver

from ..forks import Forked, Forks

Start = Callable[..., Forked]


@pytest.fixture
def start(forks: Forks) -> Iterator[Start]:
    """Start a run, which ends with the test."""
    processes: list[Forked] = []

    def begin(overrides: list[str], **settings: Any) -> Forked:
        processes.append(forks.start(["train.py", *overrides], **settings))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


def wait_for(condition: Callable[[], object], process: Forked) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def steps(directory: Path) -> list[int]:
    return [row["step"] for row in read_metrics(directory / "metrics.jsonl")]


def read_until(process: Forked, text: str) -> str:
    assert process.stdout is not None
    output = ""
    while text not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    return output


def test_a_signal_while_data_is_prepared_ends_the_process(small_run, tmp_path, start):
    standard_library = (f"data.source={os.path.dirname(os.__file__)}", "data.files=*.py")
    process = start(small_run("data.tokenizer=bpe", f"data.path={tmp_path}/tokens", *standard_library))
    read_until(process, "training a tokenizer")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=5)
    assert process.returncode == 130, output
    assert output == "SIGINT: interrupted before training; nothing is lost, and the same command starts again\n"


def test_a_signal_while_the_model_is_built_ends_the_process_and_the_run_can_start_again(small_run, tmp_path, start):
    overrides = small_run("size.num_layers=12", "training.stop_after=1")
    process = start(overrides)
    wait_for((tmp_path / "run/config.yaml").exists, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=5)
    assert process.returncode == 75, output
    assert "SIGTERM: stopped before the first step; the same command starts again" in output
    assert not (tmp_path / "run/checkpoints").exists()
    assert train(compose(overrides)) == 0


def test_signals_act_during_one_long_step(small_run, start):
    process = start(small_run("training.sequence_length=16000", "training.batch_size=1", "training.num_threads=2"))
    read_until(process, "run directory")
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    read_until(process, "SIGTERM: the run stops after this step; a second signal stops it at once\n")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=5)
    assert (process.returncode, output) == (1, "")


@pytest.mark.slow
def test_a_run_whose_terminal_closes_is_saved(small_run, tmp_path, start):
    terminal, inside = pty.openpty()
    process = start(small_run("training.max_steps=100000"), stdout=inside, terminal=True)
    os.close(inside)
    deadline = time.monotonic() + 120
    while len(steps(tmp_path / "run")) < 3:
        assert time.monotonic() < deadline
        os.read(terminal, 65536)
    os.close(terminal)
    assert process.wait(60) == 75
    (stopped_at,) = steps(tmp_path / "run")[-1:]
    assert (tmp_path / f"run/checkpoints/step-{stopped_at:08d}/manifest.json").exists()


@pytest.mark.parametrize("checkpoint", ["not due", "being written", "failed"])
def test_a_signal_ends_a_validation_and_resuming_repeats_it(small_run, tmp_path, monkeypatch, checkpoint):
    keys = ("training.max_steps=6", "training.validate_every=2", "training.async_checkpoint=true",
            f"training.checkpoint_every={10 if checkpoint == 'not due' else 4}")  # fmt: skip
    assert train(compose(small_run(*keys, name="undisturbed"))) == 0
    save = Saver.save
    if checkpoint == "failed":
        monkeypatch.setattr(Saver, "save", lambda self, progress, last: last and save(self, progress, last=last))
    read, validations = validation.validation_batches, 0

    def interrupted(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        nonlocal validations
        validations += 1
        for number, batch in enumerate(read(*arguments, **keywords)):
            # each validation reads the batches twice: for the losses, and for what the mechanism reports
            if validations == 3 and number == 1:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.3)
            yield batch

    monkeypatch.setattr(validation, "validation_batches", interrupted)
    assert train(compose(small_run(*keys))) == 75
    *_, last = read_metrics(tmp_path / "run/metrics.jsonl")
    assert last["step"] == 4
    assert not [name for name in last if name.startswith("validation/")]
    # a checkpoint that is replaced would be missing for a moment
    assert (tmp_path / "run/train.log").read_text().count("saved checkpoints/step-00000004") == 1
    assert read_manifest(tmp_path / "run/checkpoints/step-00000004").step == 4
    assert train(compose(small_run(*keys))) == 0

    def results(name: str) -> list[dict[str, Any]]:
        kept = ("step", "loss", "validation/local/loss")
        return [{k: row[k] for k in kept if k in row} for row in read_metrics(tmp_path / name / "metrics.jsonl")]

    assert results("run") == results("undisturbed")


def test_blocks_can_be_nested_and_restore_the_handlers():
    outside: list[int] = []
    inner: queue.Queue[int] = queue.Queue()
    outer: queue.Queue[int] = queue.Queue()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: outside.append(number))
    open_files = len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(3):
            with on_signals((signal.SIGUSR1,), outer.put):
                with on_signals((signal.SIGUSR1,), inner.put):
                    signal.raise_signal(signal.SIGUSR1)
                    assert inner.get(timeout=5) == signal.SIGUSR1
                signal.raise_signal(signal.SIGUSR1)
                assert outer.get(timeout=5) == signal.SIGUSR1
        signal.raise_signal(signal.SIGUSR1)
        assert outside == [signal.SIGUSR1]
        assert inner.empty()
        assert outer.empty()
        deadline = time.monotonic() + 5
        while len(os.listdir("/proc/self/fd")) > open_files:
            assert time.monotonic() < deadline
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_signal_to_a_forked_child_ends_the_child_and_not_the_parent():
    received: queue.Queue[int] = queue.Queue()
    with on_signals((signal.SIGTERM,), received.put):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
        with pytest.raises(queue.Empty):
            received.get(timeout=0.2)


# seconds from the first line of the package's code
@pytest.mark.parametrize("delay", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_ctrl_c_in_the_first_seconds_prints_one_line(delay, tmp_path):
    command = ["train.py", "size=micro", "tracker=none", f"data.path={tmp_path}/tokens", f"output_dir={tmp_path}/run"]
    process = subprocess.Popen(
        [sys.executable, *command], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # before that Python itself is starting, and no code of this package runs
    while process.poll() is None and len(os.listdir(f"/proc/{process.pid}/task")) < 2:
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 130, (output, errors)
    assert len(errors.splitlines()) == 1
    assert "interrupted" in errors
