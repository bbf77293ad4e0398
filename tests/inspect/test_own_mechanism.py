"""A mechanism outside depthlm has the pictures and the colour that its class declares, and nothing else names it."""

from pathlib import Path

import numpy as np
import pytest

import depthlm
from depthlm.config.saved import signed_config_text
from depthlm.inspect import collect, depth_mixing
from depthlm.report.figures.style import mechanism_of, mechanism_of_run, style_of
from depthlm.report.rows import gather
from depthlm.runs.records import recorded_settings
from depthlm.sweeps.points import sweep_points

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
    rows = gather(sweep_points(["model/connection=leaky,residual", "model/attention=moda"], config_dir))
    leaky, moda = (mechanism_of(row.points[0]) for row in rows)
    assert leaky == ("leaky+moda", "#123456")
    assert style_of([leaky, moda])[0].colour == "#123456"
    assert moda.colour == "#56B4E9"


def test_a_report_of_runs_imports_it_only_for_the_user_who_trained_them(config_dir, tmp_path):
    config = depthlm.compose(["model/connection=leaky"], config_dir=config_dir)
    run = tmp_path / "run"
    run.mkdir()
    file = run / "config.yaml"
    file.write_text(signed_config_text(config))
    assert mechanism_of_run("leaky", run, recorded_settings(run)).colour == "#123456"
    # the text without its first line has no signature
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:-1]))
    assert mechanism_of_run("leaky", run, recorded_settings(run)).colour != "#123456"
