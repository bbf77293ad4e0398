"""Tables: those of papers are consistent with the papers and with our models, those of pages with committed results."""

import json

import pytest
import yaml

from benchmarks import host, kernels, mechanisms, peers, throughput
from benchmarks.shared.operators import read_table
from depthlm.locations import CONF, REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results"

# Depth-Attention (arXiv 2606.05014), Table 3
OVERHEADS = {
    "1.5b": {"Depth-Attention": 0.091, "DenseFormer": 0.506, "Attention Residuals": 0.478, "mHC": 3.21},
    "3b": {"Depth-Attention": 0.112, "DenseFormer": 0.479, "Attention Residuals": 0.751, "mHC": 3.08},
}


@pytest.mark.parametrize("size", OVERHEADS)
def test_step_times_are_those_of_the_variants_in_the_experiment(size):
    overrides, overheads = mechanisms.read_table(f"depth_attention_step_{size}")
    assert f"size={size}" in overrides
    points = yaml.safe_load((CONF / "experiment/depth_attention/main.yaml").read_text())["experiment"]["points"]
    settings = {"label", "task", "size", "paper", "model"}
    variants = {
        point["label"]: " ".join([point["model"], *(f"{k}={v}" for k, v in point.items() if k not in settings)])
        for point in points
        # those with another schedule have the same step
        if point["size"] == size and point["model"] != "vanilla" and "schedule.min_lr_ratio" not in point
    }
    assert {*overheads} == {*variants.values()}
    for label, printed in OVERHEADS[size].items():
        # the paper rounds seconds and overheads
        assert overheads[variants[label]] == pytest.approx(printed, abs=0.01)


def test_modas_ablation_is_one_shape_in_four_layouts():
    rows = read_table("moda_ablation")
    assert {shape for _, shape in rows} == {kernels.Shape(1, 1024, 4096, 0, 64, 8, 64, 64)}
    assert all(row["num_heads"] == row["groups"] * row["num_kv_heads"] for row, _ in rows)
    times = [row["milliseconds"] for row, _ in rows]
    # the paper: about 162.5 times, 52.0% less, 4.31 times, and about 1458 times in all
    assert times[0] / times[1] == pytest.approx(162.5, abs=0.05)
    assert 1 - times[2] / times[1] == pytest.approx(0.52, abs=5e-4)
    assert times[2] / times[3] == pytest.approx(4.31, abs=5e-3)
    assert times[0] / times[3] == pytest.approx(1458, abs=0.5)


@pytest.mark.parametrize(
    ("script", "results", "page"),
    [
        (host, "host-xeon-2-cores", "benchmarks/README.md"),
        (peers, "peers-sm90", "docs/kernels.md"),
        (throughput, "throughput-epyc-2-cores", "benchmarks/README.md"),
    ],
)
def test_the_pages_have_the_committed_results(script, results, page):
    measured = json.loads((RESULTS / f"{results}.json").read_text())
    assert script.markdown(measured) in (REPOSITORY / page).read_text()


def test_the_thirteen_settings_of_moda_are_consistent():
    rows = read_table("moda_efficiency")
    assert [row["row"] for row, _ in rows] == [*range(1, 14)]
    assert [(shape.length, shape.h, shape.k, shape.e, shape.entries) for _, shape in rows] == [
        *((2**i, 64, 8, 64, 64) for i in range(12, 17)),
        *((2**14, 8 * groups, 8, 64, 64) for groups in (2, 4, 8, 16, 32)),
        *((2**14, 64, 8, 64, entries) for entries in (64, 128, 256)),
    ]
    for row, shape in rows:
        assert shape.h == shape.k * row["groups"]
        # the paper's percentages are relative to MoDA's time
        assert 100 * (1 - row["flash_ms"] / row["moda_ms"]) == pytest.approx(row["extra_time_percent"], abs=0.01)
        assert 100 * row["groups"] / 64 == pytest.approx(row["depth_utilization"], abs=0.01)
    added = [row["moda_ms"] / row["flash_ms"] - 1 for row, _ in rows]
    assert added[0] == pytest.approx(0.349, abs=5e-4)
    assert added[4] == pytest.approx(0.028, abs=5e-4)
