"""Two persistent processes joined by gloo, so that tests on two ranks need not start Python each time."""

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

WORLD_SIZE, SECONDS = 2, 180.0


class TwoRanks:
    """Calls a function on both ranks; it must be importable, since it is sent to the other processes by name."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        port, self.pipes, self.processes = free_port(), [], []
        for rank in range(WORLD_SIZE):
            parent_pipe, child_pipe = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, child_pipe), daemon=True)
            process.start()
            self.pipes.append(parent_pipe)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the function's result on each rank. Raises AssertionError with the traceback of a rank that fails."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                self.close()
                raise AssertionError(f"rank {rank} did not answer within {SECONDS:.0f} s")
        answers = [pipe.recv() for pipe in self.pipes]
        failed = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text)
        assert not failed, failed
        return [value for value, _ in answers]

    def close(self) -> None:
        """End both processes."""
        for process in self.processes:
            process.kill()
            process.join()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def train_on_ranks(overrides: list[str]) -> int | str:
    """Train with these overrides, as train.py would. Returns the exit code, or the message of a UserError."""
    import depthlm
    from depthlm.errors import UserError
    from depthlm.training import train

    try:
        return train(depthlm.compose(overrides))
    except UserError as error:
        return str(error)


def rank_variables(rank: int, port: int, world_size: int = WORLD_SIZE) -> dict[str, str]:
    """Return the variables that a launcher would set for this rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _serve(rank: int, port: int, pipe: Connection) -> None:
    os.environ |= rank_variables(rank, port)
    import torch

    from depthlm.distributed.launchers import ranks
    from depthlm.distributed.process_group import start_distributed

    torch.set_num_threads(1)
    start_distributed(ranks())
    # DeepSpeed never releases the first process group of a process
    torch.distributed.destroy_process_group = lambda *_: None
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        # otherwise every run would look for garbage in all imported modules
        gc.collect()
        gc.freeze()
        try:
            pipe.send((function(*arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
