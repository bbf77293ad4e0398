"""`python -m depthlm report`: its arguments, its errors and its output."""

import sys
from pathlib import Path

import pytest
import yaml

from depthlm.__main__ import main
from depthlm.sweeps import sweep_points

from .made_up import row, write_run

CONFIGS = Path("configs")


@pytest.fixture(autouse=True)
def _experiment() -> None:
    """An experiment file in CONFIGS."""
    settings = {
        "title": "A pair",
        "points": [{"label": "[A]", "model": "vanilla", "paper": {"loss": 2.5}}, {"label": "B", "model": "dca"}],
        "columns": {"loss": {"title": "loss", "metric": "validation_loss"}},
    }
    file = CONFIGS / "experiment" / "pair.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{yaml.safe_dump({'experiment': settings})}")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["depthlm", "report", *arguments, "--config-dir", str(CONFIGS)])
    main()


@pytest.mark.usefixtures("real_directories")
def test_report_prints_the_main_table_and_the_path_or_the_command_that_trains(monkeypatch, capsys):
    write_run("outputs/pair/vanilla-tiny-seed1", 2.5)
    run(monkeypatch, "experiment=pair")
    shown = capsys.readouterr().out
    for text in ("[A]", "2.500", "missing", "report: outputs/pair/report/report.md", "loss_curves.png"):
        assert text in shown
    assert "2 runs: 1 complete, 1 waiting." in shown
    assert "[A]" in Path("outputs/pair/report/report.md").read_text().replace("\\", "")
    run(monkeypatch, "experiment=pair", "seed=3", "to=report")
    trained = capsys.readouterr().out.splitlines()[-1]
    assert trained.endswith(f"To train them: python train.py -m experiment=pair seed=3 --config-dir={CONFIGS}")


@pytest.mark.usefixtures("real_directories")
def test_overrides_select_points_and_changes_are_reported(monkeypatch):
    write_run("outputs/pair/dca-tiny-seed1", 2.25)
    write_run("outputs/pair/dca-tiny-seed2", 2.75)
    run(monkeypatch, "experiment=pair", "model=dca", "seed=1,2", "training.log_every=5", "to=report")
    text = Path("report/report.md").read_text()
    assert row(text, "B")[:2] == ["2", "2.500 ± 0.354"]
    assert "[A]" not in text.replace("\\", "")
    assert "comparable" not in text
    run(monkeypatch, "experiment=pair", "size=micro", "to=report")
    text = Path("report/report.md").read_text()
    assert "changes the protocol (size=micro)" in text
    assert "| size               | micro" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the overrides of train.py -m"),
        (["experiment=pair,other"], "a report covers one experiment"),
        (["experiment=pair", "size=micor"], "micro"),
        (["nowhere"], "nowhere: no such folder"),
        (["file", "seed=1"], "seed=1: not with a folder of runs"),
        (["experiment=pair", "to=file"], "to=file: the report cannot be written there"),
    ],
)
def test_mistakes_print_a_message_and_exit_with_2(monkeypatch, capsys, arguments, message):
    Path("file").write_text("")
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("depthlm report: ")
    assert message in error
    assert "Traceback" not in error


def test_a_sweep_without_an_experiment_has_a_report(monkeypatch, capsys):
    losses = {"mhc": {1e-3: (3.0, 3.1), 3e-3: (2.8, 2.91)}, "vanilla": {1e-3: (3.05, 3.16), 3e-3: (2.9, 3.0)}}
    folders = {}
    for point in sweep_points(["model=vanilla,mhc", "optimizer.lr=1e-3,3e-3", "seed=1,2"]):
        folders[point.label, point.seed] = point.directory
        of_seeds = losses[point.mechanism][float(point.settings["optimizer.lr"])]
        write_run(point.directory, of_seeds[int(point.seed or 0) - 1])
    run(monkeypatch, "model=vanilla,mhc", "optimizer.lr=1e-3,3e-3", "seed=1,2")
    shown = capsys.readouterr().out
    lines = [line.strip() for line in shown.splitlines() if "lr " in line]
    assert [line.split("  ")[0] for line in lines] == [
        "mhc, lr 3e-3", "vanilla, lr 3e-3", "mhc, lr 1e-3", "vanilla, lr 1e-3",
    ]  # fmt: skip
    assert "-0.0950 [-0.1165, -0.0735]" in lines[0]
    assert "against vanilla" in shown
    assert "8 runs: 8 complete." in shown
    assert "comparable" not in shown
    folder = Path("outputs/default/report-vanilla-mhc-lr1e-3-3e-3-seed1-2")
    text = (folder / "report.md").read_text()
    run(monkeypatch, "model=vanilla,mhc", "optimizer.lr=1e-3,3e-3", "seed=1,2", "baseline=mhc")
    assert "against mhc" in Path(f"{folder}-baseline-mhc/report.md").read_text()
    assert (folder / "report.md").read_text() == text
    assert row(text, "mhc, lr 1e-3, seed 2")[-1] == folders["mhc, lr 1e-3", "2"]
    assert "| size               | tiny" in text
