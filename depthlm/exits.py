"""How a command exits after a user error."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from depthlm.distributed.launchers import is_rank_0
from depthlm.errors import UserError
from depthlm.streams import printable

USER_MISTAKE = 2


def exit_on_mistake(command: str, action: Callable[[], None]) -> None:
    """Run the action. A UserError is printed without a traceback and ends the process with exit code 2.

    If the reader of the output has closed the pipe, as `| head` does, the process exits with code 1.
    """
    try:
        action()
    except UserError as error:
        fail(command, error)
    except BrokenPipeError:
        # otherwise the interpreter would flush standard output at exit and print another error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def fail(command: str, error: UserError) -> NoReturn:
    """Print a user error, on rank 0 only, and exit with code 2."""
    if is_rank_0():
        # a message may quote a file of somebody else
        print(printable(f"{command}: {error}"), file=sys.stderr)
    sys.exit(USER_MISTAKE)
