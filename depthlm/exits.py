"""How a command ends where the user made a mistake."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from depthlm.distributed.launchers import first_rank
from depthlm.errors import UserError

USER_MISTAKE = 2


def exit_on_mistake(command: str, action: Callable[[], None]) -> None:
    """Run the action; a UserError is printed and ends the process with 2, without a traceback.

    Where the reader of the output has left, as `| head` does, the process ends with 1.
    """
    try:
        action()
    except UserError as error:
        fail(command, error)
    except BrokenPipeError:
        # else the interpreter would try to write the rest, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def fail(command: str, error: UserError) -> NoReturn:
    """Print a user's mistake, on rank 0 only, and exit with 2."""
    if first_rank():
        print(f"{command}: {error}", file=sys.stderr)
    sys.exit(USER_MISTAKE)
