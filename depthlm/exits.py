"""How a command ends where the user made a mistake."""

import sys
from collections.abc import Callable
from typing import NoReturn

from depthlm.errors import UserError
from depthlm.launchers import first_rank

USER_MISTAKE = 2


def exit_on_mistake(command: str, action: Callable[[], None]) -> None:
    """Run the action; a UserError is printed and ends the process with 2, without a traceback."""
    try:
        action()
    except UserError as error:
        fail(command, error)


def fail(command: str, error: UserError) -> NoReturn:
    """Print a user's mistake, on rank 0 only, and exit with 2."""
    if first_rank():
        print(f"{command}: {error}", file=sys.stderr)
    sys.exit(USER_MISTAKE)
