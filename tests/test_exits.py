"""How a command exits after what the system refuses."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from depthlm.exits import exit_on_mistake


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number), "to/file")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refusal(errno.ENOSPC), "depthlm x: No space left on device: to/file. Make room"),
        (refusal(errno.ENAMETOOLONG), "File name too long"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "I/O error: No space left"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (MemoryError(), "out of memory"),
    ],
)
def test_what_the_system_refuses_ends_with_2_and_its_words(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        exit_on_mistake("depthlm x", action)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "no such file", "a"), RuntimeError("a bug"), KeyError("a")]
)
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    def action() -> None:
        raise error

    with pytest.raises(type(error)):
        exit_on_mistake("depthlm x", action)


def test_a_path_of_any_length_is_refused(tmp_path: Path) -> None:
    def action() -> None:
        (tmp_path / ("x" * 300)).exists()

    with pytest.raises(SystemExit):
        exit_on_mistake("depthlm x", action)
