"""`depthlm runs`: what it prints, the options that do not go together, and how it removes runs."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from depthlm.commands.runs import main
from depthlm.errors import UserError
from depthlm.runs.listing import list_runs

from ..pictures import quick_pictures
from ..runs.made_up import ON_GPUS, root, write_run

__all__ = ["quick_pictures", "root"]


def names(root: Path) -> list[str]:
    return [Path(run.directory).name for run in list_runs(root)]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_json_output_contains_every_field(root, capsys):
    main(["--json", "complete"], "depthlm runs")
    (run,) = json.loads(capsys.readouterr().out)
    age = run.pop("age")
    assert age == pytest.approx(400_000, abs=60)
    assert run == {
        "directory": "outputs/default/base", "state": "complete", "model": "vanilla", "size": "micro", "step": 20,
        "tokens": 9999, "loss": 3.25, "validation_loss": 2.5, "steps": 20, "tokens_per_second": None,
        "remaining_seconds": 0.0, "gpu_hours": None, "remaining_gpu_hours": None, "failure": None,
    }  # fmt: skip


def test_the_table_shows_names_without_interpreting_markup(root, capsys):
    write_run(root, "odd/[red]name[/]", model="a[/b]")
    main([], "depthlm runs")
    printed = capsys.readouterr().out
    assert "outputs/odd/[red]name[/]" in printed
    assert "a[/b]" in printed
    assert "5 runs below outputs" in printed
    (line,) = [line for line in printed.splitlines() if "default/base" in line]
    cells = ["outputs/default/base", "complete", "vanilla", "micro", "20 / 20", "9.999K", "3.2500", "2.5000"]
    assert re.split(r"  +", line.strip()) == [*cells, "4 days 15 h"]


def test_the_table_shows_progress_gpu_hours_and_the_reason_of_a_failure(root, capsys):
    write_run(root, "gpu/begun", rows=4, environment_json=ON_GPUS)
    main(["gpu"], "depthlm runs")
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["run", "state", "model", "size", "step", "tokens/s", "left", "GPU hours", "to come", "tokens",
                        "loss", "age"]  # fmt: skip
    # 20,000 tokens at 100 tokens/s on 8 GPUs, and 180,000 tokens to come
    assert lines[3] == ["outputs/gpu/begun", "stopped", "vanilla", "micro", "40 / 400", "100", "30 min", "0.44", "4",
                        "20K", "3.2500", "0 s"]  # fmt: skip
    main(["failed"], "depthlm runs")
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["run", "state", "model", "size", "step", "tokens", "loss", "age", "reason"]
    assert lines[3][-2:] == ["2 h", "diverged"]


def test_a_comparison_prints_results_and_differing_settings_and_draws_both_curves(root, capsys):
    main(["--compare", "outputs/default/base", "outputs/default/broken", "--to", "to/here"], "depthlm runs")
    printed = capsys.readouterr().out
    for line in (["model.name", "vanilla", "mhc"], ["vanilla", "complete", "20"], ["mhc", "failed", "10"]):
        assert any(text.split()[: len(line)] == line for text in printed.splitlines()), printed
    assert Path("to/here/loss_curves.png").exists()
    assert "model.name" in Path("to/here/report.md").read_text()


def test_options_that_make_no_sense_together_are_an_error(root):
    for arguments, message in (
        (["--compare", "outputs/default/base"], "only one run"),
        (["--compare", "outputs/default/base", "outputs/default/bsae"], "did you mean `base`"),
        (["mhc", "--compare", "a", "b"], "a filter does not go with --compare"),
        (["--to", "here"], "add --compare"),
        (["mhc", "--yes"], "--yes only goes with --prune"),
        (["--prune", "--yes", "--only-checkpoints"], "--prune needs a filter"),
        (["--prune", "--yes", ""], "an empty filter"),
        (["state=complete", "out*", "--prune", "--yes"], "a word such as `out*`"),
    ):
        with pytest.raises(UserError) as caught:
            main(arguments, "depthlm runs")
        assert message in str(caught.value)
    assert len(list(root.rglob("config.yaml"))) == 4


def test_only_matching_runs_are_removed_and_only_after_yes(root, capsys):
    for arguments, words, left in (
        (["model=nothing", "--prune", "--yes"], ["nothing to remove"], 4),
        (["model=mhc", "--prune"],
         ["outputs/default/broken", "2 to remove", "Nothing was removed; --yes removes them."], 4),
        (["model=mhc", "--prune", "--yes"],
         ["removed outputs/default/broken", "Removed 2 of 2:", "KiB freed"], 2),
    ):  # fmt: skip
        main(arguments, "depthlm runs")
        printed = capsys.readouterr().out
        assert [text for text in words if text not in printed] == []
        assert len(names(root)) == left
    assert names(root) == ["base", "new"]


def test_a_terminal_asks_for_the_number(root, monkeypatch):
    for typed, left in (("1\n", 4), ("yes\n", 4), ("", 4), ("2\n", 2)):
        output = Terminal()
        monkeypatch.setattr("sys.stdin", Terminal(typed))
        monkeypatch.setattr("sys.stdout", output)
        main(["model=mhc", "--prune"], "depthlm runs")
        assert "Type 2 to remove them" in output.getvalue()
        assert ("Nothing was removed." in output.getvalue()) == (left == 4)
        assert len(names(root)) == left


def test_what_is_kept_is_listed_with_the_reason(root, capsys):
    (root / "sweep/new/config.yaml").write_text("mine: 1\n")
    main(["directory=*/sweep/*", "--prune", "--yes"], "depthlm runs")
    assert "kept: its config.yaml is not that of a run" in capsys.readouterr().out
    assert (root / "sweep/new/config.yaml").exists()
    assert not (root / "sweep/begun").exists()


def test_a_folder_that_cannot_be_removed_is_an_error_after_the_others_are_removed(root, monkeypatch):
    rmtree = shutil.rmtree

    def refuse(path: Path) -> None:
        if "broken" in path.name:
            raise PermissionError(13, "Permission denied")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UserError, match="outputs/default/broken cannot be removed"):
        main(["model=mhc", "--prune", "--yes"], "depthlm runs")
    assert names(root) == ["base", "new"]
