"""`depthlm runs`: the runs that it lists, and the folders that it ignores."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from depthlm.commands.runs import age_text, main
from depthlm.errors import UserError
from depthlm.runs.listing import list_runs

ROW = {"step": 10, "tokens": 5000, "loss": 3.25}


def make(
    root: Path, name: str, *, model: str = "vanilla", size: str = "micro", rows: int = 0, age: float = 0.0, **files: str
) -> Path:
    """Create a run directory. files: additional files by name, such as `summary_json` for summary.json."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model: {{name: '{model}'}}\nsize: {{name: '{size}'}}\n")
    if rows:
        lines = [ROW | {"step": 10 * (number + 1), "tokens": 5000 * (number + 1)} for number in range(rows)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    for file in folder.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of every state, with names in the order of their age."""
    monkeypatch.chdir(tmp_path)
    root = Path("outputs")
    summary = json.dumps({"steps": 20, "tokens": 9999, "validation_loss": 2.5})
    make(root, "default/base", rows=2, age=400_000, summary_json=summary)
    make(root, "default/broken", model="mhc", rows=1, age=7200, failure_json='{"error": "diverged"}')
    make(root, "sweep/begun", model="mhc", size="tiny", rows=1, age=90)
    make(root, "sweep/new", age=5)
    return root


def test_a_run_is_listed_with_its_state_and_newest_numbers(root: Path) -> None:
    runs = list_runs(root)
    assert [(run.directory, run.state, run.step, run.tokens, run.loss, run.validation_loss) for run in runs] == [
        ("outputs/default/base", "complete", 20, 9999, 3.25, 2.5),
        ("outputs/default/broken", "failed", 10, 5000, 3.25, None),
        ("outputs/sweep/begun", "stopped", 10, 5000, 3.25, None),
        ("outputs/sweep/new", "waiting", None, None, None, None),
    ]
    assert [run.age for run in runs] == pytest.approx([400_000, 7200, 90, 5], abs=60)


def test_a_run_locked_by_another_process_is_running(root: Path) -> None:
    with (root / "sweep/begun/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [run.directory for run in list_runs(root, ["running"])] == ["outputs/sweep/begun"]


@pytest.mark.parametrize("half", ['{"step": 20, "lo', '{"step": 20}', "\x00\x00", "{"])
def test_a_row_that_is_half_written_is_not_counted_yet(root: Path, half: str) -> None:
    with (root / "sweep/begun/metrics.jsonl").open("a") as file:
        file.write(half)
    (run,) = list_runs(root, ["sweep/begun"])
    assert (run.state, run.step, run.loss) == ("stopped", 10, 3.25)


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["mhc"], ["default/broken", "sweep/begun"]),
        (["mhc", "failed"], ["default/broken"]),
        (["tiny"], ["sweep/begun"]),
        (["sweep/"], ["sweep/begun", "sweep/new"]),
        (["outputs/default/*"], ["default/base", "default/broken"]),
        (["complete"], ["default/base"]),
        (["m*"], ["default/base", "default/broken", "sweep/begun", "sweep/new"]),
        (["mh"], []),
        (["mhc", "complete"], []),
    ],
)
def test_a_run_must_match_every_filter(root: Path, filters: list[str], names: list[str]) -> None:
    assert [run.directory for run in list_runs(root, filters)] == [f"outputs/{name}" for name in names]


def test_folders_that_are_not_runs_are_not_listed(root: Path) -> None:
    make(root, "sweep/.slurm/0001/code/conf")
    make(root, "default/base/wandb/offline-run-1/files")
    assert len(list_runs(root)) == 4
    # an ignored name counts only below the root
    make(Path("wandb/mine"), "base")
    assert len(list_runs(Path("wandb"))) == 1


@pytest.mark.parametrize(
    "content", [b"", b"- 1", b"model: [", b"\xff\xfe", b"model: mhc\n", b"size: &a {name: b}\nmodel: *a"]
)
def test_a_run_with_a_broken_configuration_is_listed(root: Path, content: bytes) -> None:
    (root / "sweep/new/config.yaml").write_bytes(content)
    run = list_runs(root)[-1]
    assert (run.directory, run.model, run.size) == ("outputs/sweep/new", "?", "?")


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
    make(root, "odd/[red]name[/]", model="a[/b]")
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
