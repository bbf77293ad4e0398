"""A mechanism outside depthlm has the pictures and the colour that its class declares, and nothing else names it."""

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import depthlm
from depthlm.config.saved import signed_config_text
from depthlm.inspect import collect, depth_mixing
from depthlm.report.figures.style import Mechanism, mechanism_of, style_of
from depthlm.report.rows import gather
from depthlm.report.runs_report import find_runs, runs_report, sweep_of_runs
from depthlm.runs.records import recorded_settings
from depthlm.sweeps.points import sweep_points

from ..report.made_up import write_run
from .conftest import SHAPE, TOKENS

MODULE = '''
import torch

from depthlm.model.connection import Connection, Hidden
from depthlm.model.figures import Figure


class Leaky(Connection):
    """h <- (1 - g) h + g f(h), with a gate g of each token."""

    colour = "#123456"

    def read(self, state, weights=None):
        return (state.h,), self.weights(state) if weights is None else weights

    def weights(self, state):
        return torch.full_like(state.h[..., :1], 0.25 * (self.spec.layer + 1))

    def write(self, state, output_btd, carry):
        return Hidden((1 - carry) * state.h + carry * output_btd)

    def figures(self, state):
        if self.spec.kind == "final":
            return []
        gate = torch.stack([1 - self.weights(state), self.weights(state)])[..., 0]
        return [Figure("gate", gate, ("part", "batch", "token"), "skip and output", "0: skip, 1: output")]
'''


@pytest.fixture
def config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the option `leaky`, whose module is on the path."""
    (tmp_path / "leaky_stream.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "conf"
    (folder / "model" / "connection").mkdir(parents=True)
    (folder / "model" / "connection" / "leaky.yaml").write_text("_target_: leaky_stream.Leaky\n")
    return folder


def test_its_pictures_are_drawn_and_a_figure_needs_a_name_for_each_axis(config_dir, monkeypatch):
    config = depthlm.compose([*SHAPE, "model/connection=leaky", "model/attention=moda"], config_dir=config_dir)
    model = depthlm.build_model(config).eval()
    pictures, messages = collect(model, [TOKENS])
    assert messages == []
    names = [picture.name for picture in pictures]
    assert names == ["leaky_stream_gate", "moda_depth_share", "moda_depth_total", "moda_maps"]
    expected = [[1 - gate, gate] for gate in (0.25, 0.5, 0.75, 1)]
    for part in ("attention", "mlp"):
        np.testing.assert_allclose(pictures[0].arrays[f"leaky_stream_gate_{part}"], expected)
    pictures[0].draw()
    matrix, warnings = depth_mixing(model, [TOKENS])
    assert warnings == []
    np.testing.assert_allclose(matrix[2], [0.75**2, 0.75 * 0.25, 0.25, *[np.nan] * 6], rtol=1e-5)
    kind = type(model.connections[0])
    figures = kind.figures
    monkeypatch.setattr(
        kind, "figures", lambda self, state: [figure._replace(axes=("part",)) for figure in figures(self, state)]
    )
    with pytest.raises(ValueError, match=r"Leaky: figure gate of shape \(2, 3, 12\) has axes \('part',\)"):
        collect(model, [TOKENS])


def test_its_colour_is_that_of_its_class(config_dir, tmp_path):
    leaky, moda = map(
        mechanism_of, gather(sweep_points(["model/connection=leaky,residual", "model/attention=moda"], config_dir))
    )
    assert leaky == ("leaky+moda", "#123456")
    assert style_of([leaky, moda])[0].colour == "#123456"
    assert moda.colour == "#56B4E9"


def test_a_report_of_runs_imports_it_only_for_the_user_who_trained_them(config_dir, tmp_path):
    directories = [tmp_path / name for name in ("leaky", "vanilla")]
    for directory, overrides in zip(directories, (["model/connection=leaky"], []), strict=True):
        config = depthlm.compose(overrides, config_dir=config_dir)
        write_run(directory, config=asdict(config))
        (directory / "config.yaml").write_text(signed_config_text(config))

    def report() -> Mechanism:
        runs = find_runs(map(str, directories))
        runs_report(runs, tmp_path)
        return mechanism_of(sweep_of_runs(runs, [recorded_settings(run.directory) for run in runs]).rows[0])

    assert report() == ("leaky", "#123456")
    file = directories[0] / "config.yaml"
    # the text without its first line has no signature
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:-1]))
    sys.modules.pop("leaky_stream")
    assert report().colour != "#123456"
    assert "leaky_stream" not in sys.modules
