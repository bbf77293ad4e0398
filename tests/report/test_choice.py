"""The section of a report on the choice of a value."""

import math
from pathlib import Path
from statistics import stdev

import pytest

from depthlm.report import report
from depthlm.report.choice import choice_tables
from depthlm.report.experiment_report import experiment_report
from depthlm.report.figures.loss_curves import named_rows
from depthlm.report.rows import choice_luck
from depthlm.report.sweep import read_sweep
from depthlm.report.sweep_report import results_table
from depthlm.sweeps import sweep_points

from .made_up import row, write_run
from .test_sweep_report import lines

LR, DECAY = "optimizer.lr", "optimizer.weight_decay"
SEEDS = "experiment.selection_seeds=[11,12]"
SWEEP = ["model=vanilla,mhc", f"{LR}=1e-3,2e-3,4e-3", "seed=1,2", f"experiment.best_over={LR}", SEEDS]
# the losses of each mechanism by learning rate, for the two seeds that choose
LOSSES = {
    "vanilla": {1e-3: (3.1, 3.2), 2e-3: (3.0, 3.04), 4e-3: (3.02, 3.03)},
    "mhc": {1e-3: (3.3, 3.3), 2e-3: (3.1, 3.14), 4e-3: (2.9, 2.9), 8e-3: (3.0, None)},
}
MINE = """# @package _global_
experiment:
  best_over: optimizer.lr
  selection_seeds: [7]
  points:
    - {label: Plain, model: vanilla, optimizer.lr: [0.001, 0.002, 0.004], seed: [1, 2], paper: {loss: 2.5}}
    - {label: Wide, model: mhc, optimizer.lr: [0.001, 0.002, 0.004], seed: [1, 2]}
  columns:
    loss: {title: loss, metric: validation_loss, digits: 4}
  figure: bars
"""


def train(overrides: list[str] = SWEEP, rounds: int = 5) -> None:
    """Write the runs of a sweep, as far as so many rounds call for them."""
    for _ in range(rounds):
        for point in sweep_points(overrides):
            losses = LOSSES[point.mechanism].get(float(point.settings[LR]), (3.5, 3.5))
            loss = losses[int(point.seed or 1) - 11] if point.selects else 2.8
            write_run(point.directory, loss or 3.0, failure="DivergedError: bad" if loss is None else None)


def test_the_chosen_value_stands_between_its_neighbours_with_their_intervals():
    train()
    (vanilla, mhc) = ([cell.text for cell in cells] for cells in choice_tables(read_sweep(SWEEP))[0].rows)
    # of the differences (0.1, 0.16) and (0.02, -0.01), each with one degree of freedom; Student's t of two is 4.303
    half = 4.30265 * math.sqrt((stdev([0.1, 0.16]) ** 2 + stdev([0.02, -0.01]) ** 2) / 2) / math.sqrt(2)
    below = f"1e-3: +0.1300 [{0.13 - half:+.4f}, {0.13 + half:+.4f}]"
    above = f"4e-3: +0.0050 [{0.005 - half:+.4f}, {0.005 + half:+.4f}]"
    assert vanilla == ["vanilla", "lr", "2e-3", "3.0200", below, above, "6", "not separated from 4e-3"]
    # of one difference; Student's t of one is 12.706
    half = 12.7062 * stdev([0.2, 0.24]) / math.sqrt(2)
    below = f"2e-3: +0.2200 [{0.22 - half:+.4f}, {0.22 + half:+.4f}]"
    assert mhc == ["mhc", "lr", "4e-3", "2.9000", below, "8e-3: diverged", "8", "not separated from 2e-3"]


def test_the_luck_of_a_close_choice_is_in_the_interval_of_a_difference():
    train()
    for point in sweep_points(SWEEP):
        if not point.selects and point.seed == "2":
            write_run(point.directory, 2.82 if point.mechanism == "vanilla" else 2.84)
    sweep = read_sweep(SWEEP)
    # deviations of 0.02 / sqrt(2) and 0.04 / sqrt(2) over two seeds, so half of it for a mean of two
    expected = {"vanilla": choice_luck([3.15, 3.02, 3.025], 0.01), "mhc": choice_luck([3.3, 3.12, 2.9], 0.02)}
    assert sweep.luck == pytest.approx(expected)
    assert expected["vanilla"] > 0.002
    (entry,) = sweep.differences()
    assert entry.ours.luck == pytest.approx(math.hypot(*expected.values()))
    assert "over those of one mechanism, with the luck of the choices" in report([*SWEEP, "to=report"]).read_text()


def test_a_row_is_compared_with_the_baseline_of_its_schedule_whatever_rates_were_chosen():
    overrides = [*SWEEP, "schedule=cosine,wsd"]
    for _ in range(5):
        for point in sweep_points(overrides):
            # vanilla with wsd chooses the rate of mhc, vanilla with cosine another one
            alike = point.mechanism if point.settings["schedule"] == "cosine" else "mhc"
            losses = LOSSES[alike].get(float(point.settings[LR]), (3.5, 3.5))
            write_run(point.directory, (losses[int(point.seed or 1) - 11] or 3.9) if point.selects else 2.8)
    differences = read_sweep(overrides).differences()
    assert len(differences) == 2
    for entry in differences:
        assert entry.reference is not None
        assert entry.row.settings["schedule"] == entry.reference.settings["schedule"]


def test_before_the_first_choice_there_are_no_rows_to_draw():
    assert named_rows([]) == {}


def test_a_report_has_the_choice_its_cost_and_a_picture_or_says_which_groups_have_not_chosen(capsys):
    train(rounds=1)
    text = report([*SWEEP, "to=report"]).read_text()
    waiting = "1 group without a chosen value yet: mhc (6 of 8 runs done)."
    assert waiting in text
    assert waiting in " ".join(capsys.readouterr().out.split())
    assert row(text, "mhc", 0)[-1] == "not chosen yet"
    assert "16 runs: 12 complete, 4 waiting." in text
    train()
    text = report([*SWEEP, "to=report"]).read_text()
    # 13 of the runs that choose are complete, and have 98.7 seconds each
    assert "Spent to choose: 14 runs, 21 min of training" in text
    assert "To report: 4 runs, 7 min of training" in text
    assert row(text, "mhc", 1)[:2] == ["lr", "4e-3"]
    assert "without a chosen value" not in text
    assert Path("report/choice_lr.png").exists()
    # only the runs that report are results, and values chosen apart are compared
    assert row(text, "mhc")[:1] == ["2"]
    assert lines(results_table(read_sweep(SWEEP)))["mhc"][2] == "0.0000 [0.0000, 0.0000]"


def test_the_report_of_an_experiment_has_the_choice(tmp_path):
    (tmp_path / "conf/experiment/mine").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine/it.yaml").write_text(MINE)
    name, folder = ["experiment=mine/it"], tmp_path / "report"
    folder.mkdir()
    text, _ = experiment_report(read_sweep(name, tmp_path / "conf"), folder)
    assert "2 groups without a chosen value yet: Plain (0 of 3 runs done), Wide (0 of 3 runs done)." in text
    assert not list(folder.glob("choice*"))
    for _ in range(2):
        for point in sweep_points(name, tmp_path / "conf"):
            write_run(point.directory, 3 + abs(math.log(float(point.settings[LR]) / 2e-3)))
    text, tables = experiment_report(read_sweep(name, tmp_path / "conf"), folder)
    assert [table.title for table in tables] == ["", "Choice"]
    assert row(text, "Plain") == ["2", "3.0000 ± 0.0000", "2.5000", "+0.5000"]
    assert row(text, "Plain", 1)[:2] == ["lr", "2e-3"]
    # with one seed that chooses, a remark stands for the interval
    assert row(text, "Plain", 1)[-1] == "one seed: no interval; runner-up 1e-3: 3.6931"
    assert row(text, "Wide", 1) == ["0.0000 \\[0.0000, 0.0000\\]", "–"]
