"""Imports what the commands import, and forks a process for each request of forks.py.

Each connection has a server of its own, forked when it is made. The first one ends after the last of them.
"""

import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

# nothing here starts a thread, or reads a variable that a test sets
PRELOADED = (
    "torch", "torch._inductor", "torch.distributed.fsdp", "deepspeed", "hydra", "matplotlib.pyplot",
    "matplotlib.backends.backend_agg", "depthlm.commands.prepare", "depthlm.commands.train", "depthlm.slurm.submit",
    "depthlm.sweeps", "depthlm.training",
)  # fmt: skip


def _next_connection(listener: socket.socket, address: Path) -> socket.socket:
    """Return each connection in a process forked for it."""
    servers: dict[int, int] = {}
    open_to_all = True
    while True:
        for ready in select.select([listener.fileno(), *servers], [], [])[0]:
            if ready in servers:
                os.waitpid(servers.pop(ready), 0)
                os.close(ready)
                continue
            control, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                for server in servers:
                    os.close(server)
                return control
            control.close()
            servers[os.pidfd_open(pid)] = pid
        if not servers:
            if open_to_all:
                address.unlink(missing_ok=True)
                open_to_all = False
            # somebody may have connected before the address was gone
            if not select.select([listener], [], [], 0)[0]:
                sys.exit()


def _serve(control: socket.socket) -> list[str]:
    """Fork a process for each request; returns its command in that process. Ends when no more requests can come."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([control.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, status = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                # nobody may wait for it any more
                with suppress(BrokenPipeError):
                    os.write(status, f"{code}\n".encode())
                os.close(status)
                os.close(ready)
                continue
            message, files, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            pid = os.fork()
            if pid == 0:
                for file in (control.detach(), *running, *(status for _, status in running.values())):
                    os.close(file)
                return _become(json.loads(message), files)
            *streams, status = files
            for file in streams:
                os.close(file)
            os.write(status, f"{pid}\n".encode())
            running[os.pidfd_open(pid)] = (pid, status)


def _become(given: dict[str, Any], files: list[int]) -> list[str]:
    """Give this forked process the session, streams, folder and environment of its command, and return the command."""
    os.setsid()
    # ignored where the tests run under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    if given["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return list(given["words"])


def _execute(words: list[str]) -> None:
    """Execute a command, as `python *words` does."""
    script, *arguments = words
    if script in ("-c", "-m"):
        named, *arguments = arguments
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.getcwd())
        if script == "-c":
            exec(compile(named, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(named, run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    address = Path(sys.argv[1])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen()
    for name in PRELOADED:
        importlib.import_module(name)
    sys.stdout.flush()
    # what is imported is never garbage
    gc.freeze()
    _execute(_serve(_next_connection(listener, address)))
