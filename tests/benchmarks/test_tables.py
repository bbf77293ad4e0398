"""Tables: those of papers are consistent with the papers and with our models, those of pages with committed results."""

import json

import pytest
import yaml

from benchmarks import mechanisms, peers, throughput
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


def test_presets_are_timed_beside_vanilla_and_one_that_fails_has_a_line(tmp_path):
    def build(name):
        if name == "broken":
            raise RuntimeError("out of memory")
        return {"step": lambda: None}

    results, file = {}, tmp_path / "results.json"
    status = mechanisms.measure_presets(
        ["dca", "broken"], build, lambda name, seconds: {"turns": len(seconds["step"][0])}, 2, results, file
    )
    assert status == 1
    assert json.loads(file.read_text())["presets"] == results["presets"]
    assert {name: line.get("turns") for name, line in results["presets"].items()} == {
        "vanilla": 2, "dca": 2, "broken": None
    }  # fmt: skip
    assert "out of memory" in results["presets"]["broken"]["error"]


@pytest.mark.parametrize(
    ("script", "results", "page"),
    [
        (peers, "peers-sm90", "docs/kernels.md"),
        (throughput, "throughput-epyc-2-cores", "benchmarks/README.md"),
    ],
)
def test_the_pages_have_the_committed_results(script, results, page):
    measured = json.loads((RESULTS / f"{results}.json").read_text())
    assert script.markdown(measured) in (REPOSITORY / page).read_text()
