"""How a command exits after a user error."""

import os
import sys
from collections.abc import Callable

from depthlm.distributed.launchers import is_rank_0
from depthlm.errors import UserError
from depthlm.files import system_limit
from depthlm.streams import printable

USER_MISTAKE = 2


def exit_on_mistake(command: str, action: Callable[[], None]) -> None:
    """Run the action. A UserError is printed without a traceback and ends the process with exit code 2.

    So is what the system refuses, such as space on the disk. If the reader of the output has closed the pipe, as
    `| head` does, the process exits with code 1.
    """
    try:
        return action()
    except UserError as error:
        message = str(error)
    except BrokenPipeError:
        # otherwise the interpreter would flush standard output at exit and print another error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if (reason := system_limit(error)) is None:
            raise
        message = f"{reason}. Make room or fix the cause, then run the same command again"
    if is_rank_0():
        # a message may quote a file of somebody else
        print(printable(f"{command}: {message}"), file=sys.stderr)
    sys.exit(USER_MISTAKE)
