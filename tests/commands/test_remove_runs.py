"""`depthlm runs <filters> --prune`: the list, the confirmation, and what is printed."""

import io
import json
import shutil
from pathlib import Path

import pytest

from depthlm.commands.runs import main
from depthlm.errors import UserError
from depthlm.runs.listing import list_runs

from ..runs.made_up import root

__all__ = ["root"]


def names(root: Path) -> list[str]:
    return [Path(run.directory).name for run in list_runs(root)]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_removed_without_a_confirmation(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["model=mhc", "--prune"], "depthlm runs")
    printed = capsys.readouterr().out
    assert "outputs/default/broken" in printed
    assert "2 to remove" in printed
    assert "Nothing was removed; --yes removes them." in printed
    assert len(names(root)) == 4


def test_yes_removes_the_matching_runs_and_prints_what_was_freed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["model=mhc", "--prune", "--yes"], "depthlm runs")
    printed = capsys.readouterr().out
    assert "removed outputs/default/broken" in printed
    assert "Removed 2 of 2:" in printed
    assert "KiB freed" in printed
    assert names(root) == ["base", "new"]


@pytest.mark.parametrize(("typed", "left"), [("2\n", 2), ("1\n", 4), ("yes\n", 4), ("", 4)])
def test_a_terminal_asks_for_the_number(root: Path, monkeypatch: pytest.MonkeyPatch, typed: str, left: int) -> None:
    output = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stdout", output)
    main(["model=mhc", "--prune"], "depthlm runs")
    assert "Type 2 to remove them" in output.getvalue()
    assert ("Nothing was removed." in output.getvalue()) == (left == 4)
    assert len(names(root)) == left


def test_json_lists_what_would_be_removed_and_with_yes_what_was(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["state=failed", "--prune", "--json"], "depthlm runs")
    (planned,) = json.loads(capsys.readouterr().out)
    assert planned.pop("bytes") > 0
    assert planned == {
        "directory": "outputs/default/broken", "state": "failed", "path": "outputs/default/broken", "kept": None,
        "removed": False,
    }  # fmt: skip
    assert len(names(root)) == 4
    main(["state=failed", "--prune", "--json", "--yes"], "depthlm runs")
    assert [entry["removed"] for entry in json.loads(capsys.readouterr().out)] == [True]
    assert len(names(root)) == 3


def test_what_is_kept_is_listed_with_the_reason(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "sweep/new/config.yaml").write_text("mine: 1\n")
    main(["directory=*/sweep/*", "--prune", "--yes"], "depthlm runs")
    assert "kept: its config.yaml is not that of a run" in capsys.readouterr().out
    assert (root / "sweep/new/config.yaml").exists()
    assert not (root / "sweep/begun").exists()


def test_a_folder_that_cannot_be_removed_is_an_error_after_the_others_are_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def refuse(path: Path) -> None:
        if "broken" in path.name:
            raise PermissionError(13, "Permission denied")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UserError, match="outputs/default/broken cannot be removed"):
        main(["model=mhc", "--prune", "--yes"], "depthlm runs")
    assert names(root) == ["base", "new"]


def test_a_filter_that_matches_nothing_removes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["model=nothing", "--prune", "--yes"], "depthlm runs")
    assert "nothing to remove" in capsys.readouterr().out
    assert len(names(root)) == 4
