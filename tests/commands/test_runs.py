"""`depthlm runs`: what it prints, and the options that do not go together."""

import json
from pathlib import Path

import pytest

from depthlm.commands.runs import age_text, main
from depthlm.errors import UserError

from ..pictures import quick_pictures
from ..runs.made_up import root, write_run

__all__ = ["quick_pictures", "root"]


def test_json_output_contains_every_field(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json", "complete"], "depthlm runs")
    (run,) = json.loads(capsys.readouterr().out)
    age = run.pop("age")
    assert age == pytest.approx(400_000, abs=60)
    assert run == {
        "directory": "outputs/default/base", "state": "complete", "model": "vanilla", "size": "micro", "step": 20,
        "tokens": 9999, "loss": 3.25, "validation_loss": 2.5,
    }  # fmt: skip


def test_the_table_shows_names_without_interpreting_markup(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root, "odd/[red]name[/]", model="a[/b]")
    main([], "depthlm runs")
    printed = capsys.readouterr().out
    assert "outputs/odd/[red]name[/]" in printed
    assert "a[/b]" in printed
    assert "5 runs below outputs" in printed
    (line,) = [line for line in printed.splitlines() if "default/base" in line]
    cells = ["outputs/default/base", "complete", "vanilla", "micro", "9.999K", "3.2500", "2.5000", "4", "days"]
    assert line.split() == cells


def test_another_root_can_be_given(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--root", "outputs/sweep", "begun"], "depthlm runs")
    assert "1 run below outputs/sweep" in capsys.readouterr().out
    with pytest.raises(UserError, match="--root nowhere: no such folder"):
        main(["--root", "nowhere"], "depthlm runs")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (90, "1 min"), (7199, "1 h"), (10_000, "2 h"), (172_799, "47 h"), (400_000, "4 days")],
)
def test_an_age_is_shown_in_one_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_a_value_that_was_filtered_or_sorted_by_is_a_column(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (root / "default/base/config.yaml").open("a") as file:
        file.write("optimizer: {lr: 0.001}\ndata: {name: '[b]'}\n")
    main(["optimizer.lr<1", "loss<9", "--sort", "data"], "depthlm runs")
    printed = capsys.readouterr().out.splitlines()
    (head,) = [line for line in printed if "validation" in line]
    assert head.split() == ["run", "state", "model", "size", "tokens", "loss", "validation", "optimizer.lr", "data",
                            "age"]  # fmt: skip
    (line,) = [line for line in printed if "default/base" in line]
    assert line.split()[7:9] == ["0.001", "[b]"]


def test_a_comparison_prints_results_and_differing_settings_and_draws_both_curves(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--compare", "outputs/default/base", "outputs/default/broken", "--to", "to/here"], "depthlm runs")
    printed = capsys.readouterr().out
    for line in (["model.name", "vanilla", "mhc"], ["base", "complete", "20"], ["broken", "failed", "10"]):
        assert any(text.split()[: len(line)] == line for text in printed.splitlines()), printed
    assert Path("to/here/loss_curves.png").exists()
    assert "model.name" in Path("to/here/report.md").read_text()


def test_runs_with_the_same_configuration_are_said_to_have_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--compare", "outputs/default/base", "outputs/sweep/new"], "depthlm runs")
    assert "No setting that affects the result differs." in capsys.readouterr().out
    assert Path("outputs/report/report.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "outputs/default/base"], "only one run"),
        (["--compare", "outputs/default/base", "outputs/default/bsae"], "did you mean `base`"),
        (["--compare", "a", "b", "--prune"], "--prune does not go with --compare"),
        (["mhc", "--compare", "a", "b"], "a filter does not go with --compare"),
        (["--to", "here"], "add --compare"),
        (["mhc", "--yes"], "--yes only goes with --prune"),
        (["mhc", "--only-checkpoints"], "--only-checkpoints only goes with --prune"),
        (["--prune"], "--prune needs a filter"),
        (["--prune", "--yes", "--only-checkpoints"], "--prune needs a filter"),
        (["--prune", "--yes", ""], "an empty filter"),
        (["failed", "--prune", "--yes"], "a word such as `failed` also matches parts of directories"),
        (["state=complete", "out*", "--prune", "--yes"], "a word such as `out*`"),
    ],
)
def test_options_that_make_no_sense_together_are_an_error(root: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        main(arguments, "depthlm runs")
    assert message in str(caught.value)
    assert len(list(root.rglob("config.yaml"))) == 4
