"""How a command exits after what the system refuses."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from depthlm.commands.exits import exit_on_mistake


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number), "to/file")


def ended(error: Exception) -> None:
    """End a command with this error."""

    def action() -> None:
        raise error

    exit_on_mistake("depthlm x", action)


def test_what_the_system_refuses_ends_with_2_and_its_words(capsys):
    for error, words in (
        (refusal(errno.ENOSPC), "depthlm x: No space left on device: to/file. Make room"),
        (refusal(errno.ENAMETOOLONG), "File name too long"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "I/O error: No space left"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (MemoryError(), "out of memory"),
    ):
        with pytest.raises(SystemExit) as caught:
            ended(error)
        assert caught.value.code == 2
        assert words in capsys.readouterr().err
    # as the system says it
    with pytest.raises(SystemExit):
        exit_on_mistake("depthlm x", Path("x" * 300).stat)


def test_other_errors_keep_their_traceback():
    for error in (FileNotFoundError(errno.ENOENT, "no such file", "a"), RuntimeError("a bug"), KeyError("a")):
        with pytest.raises(type(error)):
            ended(error)
