"""Two or more persistent processes joined by gloo, so that tests on two ranks need not start Python each time."""

import gc
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from .forks import Forks, environment_with
from .ranks import WORLD_SIZE, free_port, rank_variables

SECONDS = 180.0


class TwoRanks:
    """Calls a function on all ranks; it must be importable, since it is sent to the other processes by name."""

    def __init__(self, forks: Forks, ranks: int = WORLD_SIZE) -> None:
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        with Listener(family="AF_UNIX") as listener:
            for rank in range(ranks):
                command = ["-m", "tests.two_ranks", str(listener.address)]
                environment = environment_with(**rank_variables(rank, port, ranks))
                self.processes.append(forks.start(command, environment=environment, stdout=1, stderr=2))
                self.pipes.append(listener.accept())

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
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.wait()


def train_on_ranks(overrides: list[str]) -> int | str:
    """Train with these overrides, as train.py would. Returns the exit code, or the message of a UserError."""
    import depthlm
    from depthlm.errors import UserError
    from depthlm.training import train

    try:
        return train(depthlm.compose(overrides))
    except UserError as error:
        return str(error)


def _serve(pipe: Connection) -> None:
    import torch

    from depthlm.distributed.launchers import ranks
    from depthlm.distributed.process_group import start_distributed
    from depthlm.training import setup
    from depthlm.training.monitoring import describe

    # as in the tests of training in one process
    describe.plot_loss = lambda *_: None
    setup.check_memory = lambda *_: None
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


if __name__ == "__main__":
    _serve(Client(sys.argv[1], family="AF_UNIX"))
