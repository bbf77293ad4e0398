"""The plot of the loss curve of a run."""

import json

import matplotlib
import matplotlib.pyplot as plt

from depthlm.runs.loss_curve import plot_loss
from depthlm.runs.plots import subplots

from ..pictures import keep_figures


def test_a_plot_leaves_the_figures_of_a_notebook_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 1000, "loss": 5.0, "mean_loss": 5.0}\n')
    earlier = matplotlib.get_backend()
    try:
        matplotlib.use("svg")
        own = plt.figure()
        plot_loss(tmp_path)
        subplots(1, 2.0, 2.0)
        assert matplotlib.get_backend() == "svg"
        assert plt.get_fignums() == [own.number]
    finally:
        plt.close("all")
        matplotlib.use(earlier)


def test_the_mean_loss_of_the_interval_is_plotted(tmp_path, monkeypatch):
    rows = [
        {"step": 4, "tokens": 4_000_000, "loss": 4.0, "mean_loss": 4.5},
        {"step": 8, "tokens": 8_000_000, "loss": None, "mean_loss": 3.5, "validation/set/loss": 3.0},
        {"step": 9, "tokens": 9_000_000, "loss": 3.4, "mean_loss": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = keep_figures(monkeypatch)
    plot_loss(tmp_path)
    training, validation = figures["loss"].axes[0].lines
    assert training.get_xydata().tolist() == [[2_000_000, 4.5], [6_000_000, 3.5]]
    assert validation.get_xydata().tolist() == [[8_000_000, 3.0]]
