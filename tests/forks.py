"""Commands in processes of their own that start at once: forked from one that has imported their packages.

A forked process differs from a new one only in what is imported already: it has its own arguments, environment,
folder, streams and session, receives signals, and ends with the command's exit code.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from depthlm.locations import REPOSITORY

from .ranks import WORLD_SIZE, free_port, rank_variables

SERVER = Path(__file__).with_name("fork_server.py")
START_SECONDS = 60.0


def environment_with(**variables: str) -> dict[str, str]:
    """Return this process's environment and these variables, without the ranks that training in this process set."""
    return {name: value for name, value in os.environ.items() if name not in rank_variables(0, 0)} | variables


class Forked:
    """A running command, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, command: Sequence[str], status: int, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self.args, self.stdout, self.stderr = command, stdout, stderr
        self.returncode: int | None = None
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the command runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends and wait; a stream that is no pipe gives "". Raises TimeoutExpired."""
        read: dict[int, str] = {}
        readers = [
            threading.Thread(target=lambda n=number, s=stream: read.update({n: s.read()}), daemon=True)
            for number, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return read.get(0, ""), read.get(1, "")

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.readline() or -signal.SIGKILL)
        return self.returncode


class Forks:
    """Starts commands: the arguments of a Python, which are a script, `-m` and a module, or `-c` and a program."""

    def __init__(self, folder: Path) -> None:
        """folder: that of the socket; all that give the same folder share one server, which ends with the last."""
        address = folder / "forks"
        with (folder / "forks.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            control = _connected(address)
            if control is None:
                subprocess.Popen(
                    [sys.executable, SERVER, address], cwd=REPOSITORY, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            deadline = time.monotonic() + START_SECONDS
            while control is None and time.monotonic() < deadline:
                time.sleep(0.02)
                control = _connected(address)
        assert control is not None, f"{SERVER} did not start within {START_SECONDS:.0f} s"
        self._control = control

    def start(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path = REPOSITORY,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        terminal: bool = False,
    ) -> Forked:
        """Start a command in a session of its own.

        environment: None: that of `environment_with`. stdout, stderr: open files; by default both go to one pipe, the
        process's `stdout`. terminal: its standard streams are a terminal, which it controls.
        """
        words, pipes = [str(word) for word in command], []
        if stdout is None:
            reader, stdout = os.pipe()
            pipes.append((reader, stdout))
        status, theirs = os.pipe()
        given = {
            "words": words, "folder": str(cwd), "environment": dict(environment or environment_with()),
            "terminal": terminal,
        }  # fmt: skip
        with open(os.devnull) as nothing:
            streams = [stdout if terminal else nothing.fileno(), stdout, stdout if stderr is None else stderr, theirs]
            socket.send_fds(self._control, [json.dumps(given).encode()], streams)
        for file in (theirs, *(writer for _, writer in pipes)):
            os.close(file)
        return Forked(words, status, os.fdopen(pipes[0][0]) if pipes else None, None)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path = REPOSITORY,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, and return its exit code and output."""
        (out, stdout), (err, stderr) = os.pipe(), os.pipe()
        process = self.start(command, cwd=cwd, environment=environment, stdout=stdout, stderr=stderr)
        os.close(stdout)
        os.close(stderr)
        process.stdout, process.stderr = os.fdopen(out), os.fdopen(err)
        try:
            output, errors = process.communicate(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.wait(), output, errors)

    def start_ranks(
        self, command: Sequence[str | Path], *, stdout: int | None = None, **variables: str
    ) -> list[Forked]:
        """Start two ranks of a command, with the variables of a launcher, and these. stdout: as in `start`."""
        port = free_port()
        return [
            self.start(command, environment=environment_with(**rank_variables(rank, port), **variables), stdout=stdout)
            for rank in range(WORLD_SIZE)
        ]

    def run_ranks(self, command: Sequence[str | Path]) -> str:
        """Run two ranks of a command to their end, and check that both succeed. Returns what they print."""
        ranks = self.start_ranks(command)
        outputs = [rank.communicate(300.0)[0] for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0] * WORLD_SIZE, outputs
        return "".join(outputs)

    def close(self) -> None:
        """End all commands."""
        self._control.close()


def _connected(address: Path) -> socket.socket | None:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        control.connect(str(address))
    except (FileNotFoundError, ConnectionRefusedError):
        control.close()
        return None
    return control
