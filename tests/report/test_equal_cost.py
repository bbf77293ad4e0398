"""Reports compare mechanisms at equal parameters, FLOPs, time and memory of generation."""

import json
import math
from pathlib import Path

import pytest

from depthlm.report.equal_cost import CONTEXT, COSTS, cost_table, with_costs
from depthlm.report.scaling_laws import curves, savings
from depthlm.report.sweep import read_sweep
from depthlm.sweeps import sweep_points

from .made_up import directories, experiment, reported, write_run

SIZES = ("nano_60k", "nano_160k", "nano_330k", "nano_630k")
# mhc has the loss of vanilla with twice the compute and twice the cache, at half the speed
GAIN = 2**-0.1


def trained() -> list[str]:
    overrides = ["model=vanilla,mhc", f"size={','.join(SIZES)}", "seed=1,2"]
    for point in sweep_points(overrides):
        is_mhc, seed = point.mechanism == "mhc", int(point.settings["seed"])
        flops = 1e15 * 4 ** SIZES.index(point.settings["size"])
        loss = 3.0 * (flops / 1e15) ** -0.1 * (GAIN if is_mhc else 1.0) * (1 + 0.01 * seed + 1e-6 * seed * is_mhc)
        write_run(
            point.directory, loss, training_flops=flops, parameters=round(math.sqrt(flops)), tokens=1000,
            tokens_per_second=1e18 / flops / (2 if is_mhc else 1), cache_bytes_per_token=200 if is_mhc else 100,
        )  # fmt: skip
    return overrides


def test_costs_are_multiples_of_the_references_and_the_law_says_how_much_more_of_each_it_needs():
    sweep = with_costs(read_sweep(trained()))
    table = cost_table(sweep, sweep.rows)
    assert table is not None
    assert table.head == ["", "loss", "parameters", "training FLOPs", "training time", "memory of generation"]
    (line,) = [[cell.text for cell in row] for row in table.rows if row[0].text == "mhc, nano_60k"]
    parameters = 2 * round(math.sqrt(1e15))
    memory = (parameters + CONTEXT * 200) / (parameters + CONTEXT * 100)
    assert line[2:] == ["1.000", "1.000", "2.000", f"{memory:.3f}"]
    first = savings(sweep, curves(sweep, COSTS))[0]
    needs = {view: needed and needed.factor for view, needed in first.needs.items()}
    assert needs["compute"] == pytest.approx(2, rel=1e-3)
    # the law over the parameters has twice the exponent, and the time of mhc is twice as long
    assert needs["parameters"] == pytest.approx(math.sqrt(2), rel=1e-3)
    assert needs["time"] == pytest.approx(1, rel=1e-3)


def test_a_report_on_mechanisms_has_the_section_and_one_on_rates_has_not():
    columns = {"loss": {"title": "loss", "metric": "validation_loss", "digits": 4}}
    for number, varied in enumerate(({"model": ["vanilla", "mhc"]}, {"optimizer.lr": [1e-3, 2e-3]})):
        of = experiment(points=[varied], columns=columns, series=next(iter(varied)))
        for directory in directories(of):
            write_run(directory, cache_bytes_per_token=100 * (number + 1))
        text = reported(of)
        assert ("## Equal cost" in text) == Path("report/equal_cost.png").exists() == (number == 0)


def test_a_training_time_that_the_logged_speeds_do_not_determine_is_unknown():
    directories = [point.directory for point in sweep_points(["model=vanilla,mhc", "seed=1"])]
    for directory in directories:
        write_run(directory, cache_bytes_per_token=100)
    # the mean of times that vary by a factor of two is known within 6%
    rows = [json.loads(line) for line in Path(directories[1], "metrics.jsonl").read_text().splitlines()]
    varying = [row | {"tokens_per_second": 1000 * (1 + row["step"] % 2)} for row in rows]
    Path(directories[1], "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in varying))
    # the first steps compile
    slow = [row | {"tokens_per_second": 10.0} if row["step"] == 1 else row for row in rows]
    Path(directories[0], "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in slow))
    sweep = with_costs(read_sweep(["model=vanilla,mhc", "seed=1"]))
    assert sweep.rows[0].runs[0].summary["training_seconds"] == pytest.approx(40_000 / 12345)
    assert ["training_seconds" in row.runs[0].summary for row in sweep.rows] == [True, False]
    table = cost_table(sweep, sweep.rows)
    assert table is not None
    assert [[cell.text for cell in row][3:] for row in table.rows] == [["1.000", "–", "1.000"]]
