"""The figure of sublayers over depth."""

import json
from pathlib import Path

import numpy as np

from depthlm.report.figures.sublayer_norms import draw_sublayer_norms

from ..pictures import keep_figures
from .made_up import directories, experiment, reported, sweep, write_run


def write_norms(directory: str, *factors: float) -> None:
    """Write measurements of three layers, in which each sublayer has another size."""
    rows = []
    for step, factor in enumerate(factors, 1):
        row = {"attention_output": [factor, 3 * factor, None], "mlp_output": [2 * factor, 4 * factor, 6 * factor]}
        rows.append({"step": step, **row, "attention_gradient": [1 / factor] * 3, "mlp_gradient": [1 / factor] * 3})
    (Path(directory) / "blocks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_last_measurement_is_drawn_over_the_sublayers(monkeypatch):
    of = experiment(points=[{"model": "vanilla"}, {"model": "mhc"}, {"model": "dca"}])
    for directory in directories(of, seeds=["1", "2"]):
        write_run(directory)
        if "dca" not in directory:
            write_norms(directory, 9.0, (2.0 if "mhc" in directory else 1.0) + 10 * ("seed2" in directory))
    figures = keep_figures(monkeypatch)
    assert draw_sublayer_norms(sweep(of, seeds=["1", "2"]), Path("x.png"))
    outputs, gradients = figures["x"].axes
    assert [line.get_label() for line in outputs.lines] == ["vanilla", "mhc"]
    for line, mean in zip(outputs.lines, (6.0, 7.0), strict=True):
        expected = mean * np.array([1, 2, 3, 4, np.nan, 6])
        np.testing.assert_allclose(np.asarray(line.get_ydata(), float), expected)
    assert all(len(np.asarray(line.get_ydata())) == 6 for line in gradients.lines)


def test_a_report_has_the_figure_or_says_that_there_is_none():
    of = experiment(points=[{"model": "vanilla"}], curves=["depth"])
    (directory,) = directories(of)
    write_run(directory)
    assert "## Sublayers over depth\n\nNothing to draw yet." in reported(of)
    write_norms(directory, 1.0)
    assert "training.log_blocks_every" in reported(of)
    assert Path("report/sublayer_norms.png").exists()
