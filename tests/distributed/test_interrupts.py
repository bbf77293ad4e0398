"""Signals reach their thread, previous handlers are restored afterwards, and Ctrl-C prints one line."""

import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from depthlm.distributed.interrupts import on_signals
from depthlm.locations import REPOSITORY


def test_blocks_can_be_nested_and_restore_the_handlers():
    def handler(number: int, frame: object) -> None:
        outside.append(number)

    outside: list[int] = []
    inner: queue.Queue[int] = queue.Queue()
    outer: queue.Queue[int] = queue.Queue()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous_handler, previous_fd = signal.signal(signal.SIGUSR1, handler), signal.set_wakeup_fd(writer)
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
        assert (outside, os.read(reader, 9)) == ([signal.SIGUSR1], bytes([signal.SIGUSR1]))
        assert inner.empty()
        assert outer.empty()
        deadline = time.monotonic() + 5
        while len(os.listdir("/proc/self/fd")) > open_files:
            assert time.monotonic() < deadline
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)
        assert signal.set_wakeup_fd(previous_fd) == writer
        os.close(reader)
        os.close(writer)


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


COMMANDS = {
    "train": ["train.py", "size=micro", "tracker=none", "data.path={folder}/tokens", "output_dir={folder}/train"],
    "report": ["-m", "depthlm", "report", "runs={folder}/waits"],
    "prepare": ["data/prepare.py", "data=stdlib", "data.path={folder}/tokens"],
}
# each command, and seconds from the first line of the package's code
MOMENTS = [("train", 0.3), ("report", 0.0), pytest.param("train", 1.0, marks=pytest.mark.slow),
           pytest.param("prepare", 0.6, marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize(("name", "delay"), MOMENTS)
def test_ctrl_c_in_the_first_seconds_prints_one_line(name, delay, tmp_path):
    # a report takes no time, so the summary of its run is a pipe, whose reader blocks
    (tmp_path / "waits").mkdir()
    (tmp_path / "waits" / "metrics.jsonl").touch()
    os.mkfifo(tmp_path / "waits" / "summary.json")
    command = [word.format(folder=tmp_path) for word in COMMANDS[name]]
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
