"""`runs=`: any run directories side by side."""

import json
from pathlib import Path

import pytest

from depthlm.errors import UserError
from depthlm.report import report
from depthlm.report.runs_report import distinguishing_settings, duration, find_runs, short_names
from tests.runs.wandb_file import records

from .made_up import is_png, row, write_run


@pytest.mark.usefixtures("rendered")
def test_the_report_has_the_numbers_and_differing_settings() -> None:
    write_run("outputs/a/base", 3.0, config={"seed": 1, "optimizer": {"lr": 0.1}, "output_dir": "outputs/a/base"})
    write_run("outputs/b/base", 2.5, config={"seed": 1, "optimizer": {"lr": 0.2}, "model": {"name": "a|b"}})
    write_run("outputs/c/base", 2.0, done=0.5, failure="ValueError: no\nmore", config={"optimizer": {"lr": 0.1}})
    text = report(["runs=outputs/a/base,outputs/[b-c]/*", "to=report"]).read_text()
    assert "3 runs: 2 complete, 1 failed." in text
    assert row(text, "a/base") == [
        "complete", "40", "1M", "40K", "3.0000", "3.0000", "20.086", "12,345", "1 min 39 s",
    ]  # fmt: skip
    assert row(text, "c/base")[:4] == ["failed", "20", "–", "20K"]
    assert row(text, "c/base")[5:] == ["–", "–", "–", "–"]
    assert "- c/base failed: ValueError: no" in text
    assert row(text, "optimizer.lr") == ["0.1", "0.2", "0.1"]
    assert row(text, "model.name") == ["vanilla", "a\\|b", "vanilla"]
    assert "output_dir" not in text
    assert is_png("loss_curves.png")


def test_a_single_run_and_an_unreadable_configuration() -> None:
    folder = write_run("outputs/a/base")
    text = report([f"runs={folder}", "to=report"]).read_text()
    assert "No setting that affects the result differs." in text
    (folder / "config.yaml").write_text("a: [")
    assert "No readable config.yaml: base." in report([f"runs={folder}", "to=report"]).read_text()


def test_many_runs_are_split_into_several_tables() -> None:
    for number in range(6):
        write_run(f"outputs/run-{number}", config={"seed": number})
    text = report(["runs=outputs/*", "to=report"]).read_text()
    assert row(text, "seed") == ["0", "1", "2", "3"]
    assert row(text, "seed", 1) == ["4", "5"]


def test_a_run_named_twice_is_reported_once() -> None:
    folder = write_run("outputs/a")
    assert len(find_runs([str(folder), f" {folder}/", "outputs/*"])) == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("outputs/bsae", "no such folder; did you mean `base`?"),
        ("outputs/empty", "this folder contains no run"),
        ("outputs/x*", "no run directory matches this pattern"),
        ("", "name run directories"),
        (",", "name run directories"),
        ("outputs/base,nowhere/at/all", "runs=nowhere/at/all: no such folder"),
    ],
)
def test_a_path_without_runs_is_an_error(names: str, message: str) -> None:
    write_run("outputs/base")
    Path("outputs/empty").mkdir()
    with pytest.raises(UserError) as caught:
        find_runs(names.split(","))
    assert message in str(caught.value)


def test_names_are_as_short_as_possible_and_distinct() -> None:
    assert short_names([Path("o/a/base"), Path("o/b/base")]) == ["a/base", "b/base"]
    assert short_names([Path("o/a"), Path("o/b")]) == ["a", "b"]


def test_curves_are_named_by_the_settings_that_distinguish_the_runs() -> None:
    mhc = {"model.name": "mhc", "model.connection.num_streams": 4, "optimizer.lr": 0.1}
    assert distinguishing_settings({"a": mhc, "b": mhc | {"model.name": "dca", "optimizer.lr": 0.2}}) == {
        "a": "mhc",
        "b": "dca",
    }
    by_setting = {"a": mhc, "b": mhc | {"model.connection.num_streams": 2}, "c": mhc | {"optimizer.lr": 0.2}}
    assert distinguishing_settings(by_setting) == {
        "a": "num streams 4, lr 0.1",
        "b": "num streams 2, lr 0.1",
        "c": "num streams 4, lr 0.2",
    }
    assert distinguishing_settings({"a": mhc, "b": mhc}) == {"a": "a", "b": "b"}


def test_durations_are_formatted_with_units() -> None:
    assert [duration(value) for value in (None, 12.34, 98.7, 7500.0)] == ["–", "12.3 s", "1 min 39 s", "2 h 05 min"]


def test_a_project_that_wandb_cannot_have_is_refused() -> None:
    for project in ("", "a/b/c", "team/"):
        with pytest.raises(UserError, match="must be <project> or <team>/<project>"):
            report(["runs=outputs/a/base", f"wandb={project}"])


@pytest.mark.usefixtures("rendered")
def test_a_report_is_uploaded_to_wandb_with_numbers_that_can_be_plotted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_run("outputs/a/base", 3.0, config={"optimizer": {"lr": 0.1}})
    write_run("outputs/b/base", 2.5, config={"optimizer": {"lr": 0.2}})
    for _ in range(2):
        report(["runs=outputs/a/base,outputs/b/base", "to=report", "wandb=team/depthlm"])
    assert "offline in report/wandb; `wandb sync` uploads it" in capsys.readouterr().out
    written = records(Path("report/wandb"))
    runs = [record.run for record in written if record.HasField("run")]
    assert {(run.entity, run.project, run.job_type) for run in runs} == {("team", "depthlm", "report")}
    # the second upload continues the run of the first
    assert len({run.run_id for run in runs}) == 1
    logged = [record.artifact for record in written if record.HasField("artifact")]
    assert {"report.md", "loss_curves.png"} <= {file.path for file in logged[-1].manifest.contents}
    tables = {file.name.partition("_")[0]: file for file in Path("report/wandb").rglob("*.table.json")}
    assert set(tables) == {"results", "settings"}
    content = json.loads(tables["results"].read_text())
    assert content["data"][0][content["columns"].index("validation loss")] == 3.0


def test_names_that_cannot_be_drawn_are_escaped() -> None:
    names = short_names([Path("runs/caf\udce9"), Path("runs/e\x1b[31mvil")])
    assert names == [r"caf\udce9", r"e\x1b[31mvil"]
