"""Standard streams that are closed, and text with characters that control a terminal."""

import io
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from depthlm.commands.exits import exit_on_mistake
from depthlm.console import PlainConsole
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.streams import printable

NASTY = "\x1b]0;owned\x07\x1b[2Jname\r\x9b31m\u202e\ud83d"


@given(st.text(st.characters()))
def test_printable_text_is_unchanged_but_for_control_characters(text):
    shown = printable(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    shown.encode("utf-8")
    if all(c.isprintable() or c in "\n\t" for c in text):
        assert shown == text


def test_the_console_and_errors_show_control_characters_as_escapes(capsys):
    output = io.StringIO()
    PlainConsole(file=output, width=200).print(f"[bold]{NASTY}[/]")

    def refuse() -> None:
        raise UserError(NASTY)

    with pytest.raises(SystemExit):
        exit_on_mistake("depthlm", refuse)
    assert r"\x1b]0;owned\x07\x1b[2Jname\r\x9b31m\u202e\ud83d" in capsys.readouterr().err
    assert r"\x1b]0;owned\x07\x1b[2Jname\r\x9b31m\u202e\ud83d" in output.getvalue()
    assert "\x1b" not in output.getvalue()
    # a column has room for the escapes
    table = Table("run")
    table.add_row("x\x1b[31my/run")
    PlainConsole(file=output, width=200).print(table)
    assert r"x\x1b[31my/run" in output.getvalue()


def command(script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command line of bash, with `$PY` for Python, in the checkout."""
    variables = os.environ | {"PY": sys.executable} | environment
    return subprocess.run(["bash", "-c", script], cwd=REPOSITORY, env=variables, capture_output=True)


def test_closed_streams_are_opened_so_that_no_file_takes_their_place(tmp_path):
    # a library that writes to descriptor 1 or 2 would write into the first file that is opened
    code = (
        "from depthlm.streams import prepare_streams; prepare_streams(); import os, sys; "
        f"f = open({str(tmp_path / 'file')!r}, 'w'); os.write(1, b'x'); os.write(2, b'x'); print('text'); "
        "print('text', file=sys.stderr); sys.stdout.isatty()"
    )
    assert command(f'$PY -c "{code}" >&- 2>&-').returncode == 0
    assert (tmp_path / "file").read_text() == ""
    assert command("$PY train.py --version >&- 2>&-").returncode == 0
