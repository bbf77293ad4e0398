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
