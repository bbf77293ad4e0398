"""Any run directories side by side."""

from dataclasses import asdict
from pathlib import Path

import pytest

from depthlm.config import compose
from depthlm.config.keys import flatten
from depthlm.errors import UserError
from depthlm.report import report
from depthlm.report.runs_report import distinguishing_settings, find_runs

from .made_up import row, write_run


def test_the_report_has_the_numbers_and_differing_settings():
    write_run("outputs/a/base", 3.0, config={"seed": 1, "optimizer": {"lr": 0.1}, "output_dir": "outputs/a/base"})
    write_run("outputs/b/base", 2.5, config={"seed": 1, "optimizer": {"lr": 0.1}, "model": {"name": "a|b"}})
    write_run("outputs/c/base", 2.0, done=0.5, failure="ValueError: no\nmore", config={"optimizer": {"lr": 0.2}})
    text = report(["outputs/a/base", "outputs/b", "outputs/c", "to=report"]).read_text()
    assert "3 runs: 2 complete, 1 failed." in text
    assert row(text, "a\\|b, lr 0.1") == ["1", "2.5000", "-0.5000", "1M", "40K"]
    assert row(text, "vanilla, lr 0.1") == ["1", "3.0000", "–", "1M", "40K"]
    assert row(text, "vanilla, lr 0.2") == ["0 of 1", "missing", "–", "–", "–"]
    assert row(text, "vanilla, lr 0.1", 1) == [
        "complete", "40", "3.0000", "3.0000", "20.086", "12,345", "2 min", "outputs/a/base",
    ]  # fmt: skip
    assert row(text, "vanilla, lr 0.2", 1)[:3] == ["failed: ValueError: no", "20", "2.0108"]
    assert row(text, "optimizer.lr") == ["0.1", "0.1", "0.2"]
    assert row(text, "model.name") == ["vanilla", "a\\|b", "vanilla"]
    assert "output_dir" not in text
    assert Path("report/loss_curves.png").exists()


def test_runs_that_differ_only_in_the_seed_form_one_row():
    for model, losses in {"vanilla": (3.0, 3.1, 3.05), "mhc": (2.9, 3.01, 2.95)}.items():
        for seed, loss in enumerate(losses, 1):
            write_run(f"outputs/{model}-{seed}", loss, config={"seed": seed, "model": {"name": model}})
    text = report(["outputs"]).read_text()
    assert row(text, "mhc") == ["3", "**2.9533 \\[2.8690, 3.0376\\]**", "-0.0967 \\[-0.1110, -0.0823\\]", "1M", "40K"]
    assert [row(text, f"mhc, seed {seed}")[0] for seed in (1, 2, 3)] == ["complete"] * 3
    assert Path("outputs/report/report.md").exists()


def test_the_seeds_that_choose_a_setting_are_apart_from_those_that_report():
    chosen = {"experiment": {"best_over": "optimizer.lr", "selection_seeds": [11]}, "optimizer": {"lr": 0.1}}
    for seed, loss in ((11, 1.0), (1, 3.0), (2, 3.1)):
        write_run(f"outputs/vanilla-tiny-seed{seed}", loss, config={"seed": seed, **chosen})
    text = report(["outputs"]).read_text()
    assert row(text, "vanilla")[:2] == ["2", "3.0500 \\[2.4147, 3.6853\\]"]
    assert row(text, "vanilla, seeds that choose")[:2] == ["1", "1.0000 \\[0.1015, 1.8985\\]"]
    # an extended run is apart from one that was as long from the start
    for step in (20, 30):
        Path(f"outputs/vanilla-tiny-seed2/summary-step-{step:08d}.json").write_text("{}")
    text = report(["outputs"]).read_text()
    assert {row(text, label)[0] for label in ("extended_at 20,30, seed 2", "vanilla, seed 1")} == {"1"}


def test_a_mechanism_whose_code_the_user_wrote_is_compared_with_the_runs_of_its_seeds():
    chosen = {"experiment": {"best_over": "optimizer.lr", "selection_seeds": [11]}, "optimizer": {"lr": 0.1}}
    for seed, loss in ((11, 1.0), (1, 3.0), (2, 3.1)):
        write_run(f"outputs/vanilla-tiny-seed{seed}", loss, config={"seed": seed, **chosen})
    mine = {"seed": 2, "model": {"name": "mine"}, "code": {"my.Conn": "0"}, "experiment": {"name": "other"}}
    write_run("outputs/mine-tiny-seed2", 3.0, config={**chosen, **mine})
    assert row(report(["outputs"]).read_text(), "mine, my.Conn 0")[2] == "-0.1000"


def test_runs_of_few_updates_are_called_a_trial(monkeypatch):
    for model, loss in (("vanilla", 3.0), ("mhc", 2.0)):
        for seed in (1, 2, 3):
            write_run(f"outputs/{model}{seed}", loss + 0.1 * seed, config={"seed": seed, "model": {"name": model}})
    assert "**2.2000" in report(["outputs"]).read_text()
    monkeypatch.setattr("depthlm.report.sweep.FEW_UPDATES", 41)
    text = report(["outputs"]).read_text()
    assert "**This tests the commands; its differences mean nothing: the runs have 40 updates and 3 seeds.**" in text
    assert "**2.2000" not in text


def test_another_row_may_be_the_baseline(capsys):
    for rate, loss in ((0.1, 3.0), (0.001, 2.5)):
        write_run(f"outputs/{rate}", loss, config={"optimizer": {"lr": rate}})
    report(["outputs", "baseline=optimizer.lr=1e-3"])
    assert "against lr 1e-3" in capsys.readouterr().out
    (path,) = Path("outputs").glob("report-baseline-optimizer.lr-1e-3-*/report.md")
    assert row(path.read_text(), "lr 0.1")[2] == "+0.5000"
    with pytest.raises(UserError, match=r"baseline=mhc: no such row; allowed: `lr 1e-3`, `lr 0\.1`"):
        report(["outputs", "baseline=mhc"])


def test_a_folder_may_have_an_equals_sign_in_its_name():
    for rate in ("0.1", "0.2"):
        write_run(f"runs/lr={rate}", 3.0, config={"optimizer": {"lr": float(rate)}})
    assert "2 runs: 2 complete" in report(["runs/lr=0.1", "runs/lr=0.2", "to=report"]).read_text()
    with pytest.raises(UserError, match="size=micro: not with a folder of runs"):
        report(["runs/lr=0.1", "size=micro"])


def test_a_path_without_runs_is_an_error_and_a_run_named_twice_is_reported_once():
    folder = write_run("outputs/base")
    Path("outputs/empty").mkdir()
    for names, message in {
        "outputs/bsae": "no such folder; did you mean `base`?",
        "outputs/empty": "this folder contains no run",
        "outputs/base,nowhere/at/all": "nowhere/at/all: no such folder",
    }.items():
        with pytest.raises(UserError) as caught:
            find_runs(names.split(","))
        assert message in str(caught.value)
    assert len(find_runs([str(folder), f"{folder}/", "outputs"])) == 1


def test_rows_are_named_by_the_settings_in_which_the_runs_differ():
    mhc = {"model.name": "mhc", "model.connection.num_streams": 4, "optimizer.lr": 0.1, "differences.optimizer.lr": ""}
    assert distinguishing_settings({"a": mhc, "b": mhc | {"model.name": "dca", "optimizer.lr": 0.2}}) == {
        "a": {"model": "mhc", "optimizer.lr": "lr 0.1"},
        "b": {"model": "dca", "optimizer.lr": "lr 0.2"},
    }
    streams = "model.connection.num_streams"
    by_setting = {"a": mhc, "b": mhc | {streams: 2, f"differences.{streams}": "2", "optimizer.lr": 0.2}}
    assert [*distinguishing_settings(by_setting)["b"].values()] == ["connection.num_streams 2", "lr 0.2"]
    assert distinguishing_settings({"a": mhc, "b": mhc}) == {"a": {"run": "a"}, "b": {"run": "b"}}


def test_what_follows_from_a_size_or_an_option_is_not_in_the_name_of_a_row():
    def labels(*overrides: list[str]) -> list[str]:
        configs = {str(number): flatten(asdict(compose(texts, here=False))) for number, texts in enumerate(overrides)}
        return [", ".join(parts.values()) for parts in distinguishing_settings(configs).values()]

    assert labels(["optimizer=muon"], ["optimizer=adamw"]) == ["muon", "adamw"]
    assert labels(["size=micro", "optimizer.lr=1e-3"], ["size=nano_60k"]) == ["micro, lr 1e-3", "nano_60k, lr 0.024"]
    lengths = labels(["training.max_steps=9", "model=mhc"], ["training.max_tokens=1M"])
    assert lengths == ["mhc, max_steps 9", "vanilla, max_tokens 1M"]
