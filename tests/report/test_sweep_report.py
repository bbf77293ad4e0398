"""The table of results of a sweep without an experiment."""

from dataclasses import replace

import pytest

from depthlm.errors import UserError
from depthlm.report.experiment_report import runs_table
from depthlm.report.sweep import read_sweep, with_baseline
from depthlm.report.sweep_report import results_table
from depthlm.report.tables import Table
from depthlm.sweeps import sweep_points

from .made_up import write_run


def lines(table: Table) -> dict[str, list[str]]:
    """Return the cells of each row by the first one."""
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def test_the_seeds_are_counted_and_their_interval_is_pooled():
    overrides = ["optimizer.lr=1e-3,3e-3", "seed=1,2,3"]
    for point, loss in zip(sweep_points(overrides), (3.0, 3.1, 3.2, 2.9, 3.0, 3.1), strict=True):
        write_run(point.directory, loss, done=0.5 if loss == 3.2 else 1)
    sweep = read_sweep(overrides)
    assert lines(results_table(sweep)) == {
        # of the deviations 0.0707 and 0.1 with one and two degrees of freedom; Student's t of three is 3.182
        "lr 3e-3": ["3", "3.0000 [2.8323, 3.1677]", "1M", "40K"],
        "lr 1e-3": ["2 of 3", "3.0500 [2.8446, 3.2554]", "1M", "40K"],
    }
    assert lines(runs_table(sweep))["lr 1e-3, seed 3"][:2] == ["stopped", "20"]
    table = results_table(with_baseline(sweep, "optimizer.lr=0.001"))
    assert table.head[3] == "against lr 1e-3"
    assert lines(table)["lr 3e-3"][2] == "-0.1000 [-0.1000, -0.1000]"


def test_the_best_row_is_bold_by_the_interval_of_its_own_line():
    overrides = ["model=vanilla,mhc,moda,dca", "seed=1,2"]
    losses = {"vanilla": (3.0, 3.1), "mhc": (3.0, 3.1), "moda": (3.0, 3.1), "dca": (2.6, 2.78)}

    def dca() -> tuple[str, bool]:
        for point in sweep_points(overrides):
            write_run(point.directory, losses[point.mechanism][int(point.seed or 1) - 1])
        best = results_table(read_sweep(overrides)).rows[0]
        assert best[0].text == "dca"
        return best[3].text, best[2].bold

    # Student's t of one degree of freedom is 12.706; of all four differences together it would be 2.776
    assert dca() == ("-0.3600 [-0.8682, +0.1482]", False)
    losses["dca"] = (2.6, 2.71)
    assert dca() == ("-0.3950 [-0.4585, -0.3315]", True)


def test_a_row_is_compared_only_where_the_baseline_has_its_settings():
    overrides = ["model=vanilla,mhc", "optimizer.lr=1e-3,2e-3"]
    for point in sweep_points(overrides):
        write_run(point.directory, 3.0)
    sweep = read_sweep([*overrides[:1], "optimizer.lr=1e-3,2e-3"])
    assert lines(results_table(sweep))["mhc, lr 2e-3"][2] == "0.0000"
    assert results_table(with_baseline(sweep, "optimizer.lr=1e-3")).head[3] == "against lr 1e-3"
    only_mhc = replace(sweep, rows=[row for row in sweep.rows if row.label != "vanilla, lr 2e-3"])
    assert lines(results_table(only_mhc))["mhc, lr 2e-3"][2] == "–"


def test_without_a_baseline_the_head_names_the_first_row_of_each_task():
    overrides = ["model=mhc,dca", "size=micro,tiny"]
    for point in sweep_points(overrides):
        write_run(point.directory, 3.0)
    assert results_table(read_sweep(overrides)).head[3] == "against the first row of the same task"


def test_the_baseline_is_a_label_a_mechanism_or_a_setting():
    sweep = read_sweep(["model=dca", "model/connection=mhc,residual"])
    assert with_baseline(sweep, "dca,connection=mhc").experiment.baseline == "dca,connection=mhc"
    rates = read_sweep(["optimizer.lr=1e-3,3e-3"])
    for text in ("lr 1e-3", "lr=0.001", "optimizer.lr=1e-3"):
        assert [row.label for row in rates.rows if with_baseline(rates, text).is_baseline(row)] == ["lr 1e-3"]
    for text in ("typo.key=1e-3", "nothing=vanilla", "lr=5"):
        with pytest.raises(UserError, match="no such row"):
            with_baseline(rates, text)
