"""Every kind of figure, drawn from made-up runs, and its notes."""

from dataclasses import replace
from pathlib import Path

import pytest

import depthlm
from depthlm.mechanisms.dca import DeepCrossAttention
from depthlm.mechanisms.depth_attention import DepthAttention
from depthlm.mechanisms.moda import Moda
from depthlm.mechanisms.residual import Residual
from depthlm.report.figures.style import OTHERS, mechanism_of
from depthlm.report.rows import Row
from depthlm.sweeps.best import sort_values
from depthlm.sweeps.point import Point

from ..pictures import keep_figures
from .made_up import directories, experiment, reported, sweep, write_run

LOSS = {"loss": {"title": "loss", "metric": "validation_loss"}}


def test_numbers_on_an_axis_ascend_and_words_keep_their_order():
    assert sort_values(["16", "2", "1B", "2"]) == ["2", "16", "1B"]
    assert sort_values(["wsd", "2", "cosine"]) == ["wsd", "2", "cosine"]


def test_without_numbers_no_figure_is_drawn_and_an_old_one_is_removed():
    Path("report").mkdir()
    for figure in ("bars", "lines", "scaling"):
        of = experiment(points=[{"model": ["vanilla", "dca"]}], columns=LOSS, figure=figure)
        Path(f"report/{figure}.png").write_text("old")
        assert "Nothing to draw yet." in reported(of)
        assert not Path(f"report/{figure}.png").exists()


@pytest.mark.parametrize("figure", ["bars", "lines", "scaling"])
def test_every_figure_ends_with_what_it_is_of_and_whether_it_is_comparable(figure, monkeypatch):
    shape = {"size.num_layers": [2, 4], "size.hidden_size": 64}
    points = [{"label": label, "model": label, **shape, "paper": {"loss": 3.0}} for label in ("vanilla", "dca")]
    of = experiment(points=points, columns=LOSS, figure=figure, x="size.num_layers")
    for number, directory in enumerate(directories(of, "smoke", ["1", "2"])):
        write_run(directory, done=0.5 if number == 7 else 1, tokens=188_416 if number else 1_908_736)
    figures = keep_figures(monkeypatch)
    reported(of, "smoke", ["1", "2"])
    stamps = {name: drawn.texts[-1].get_text().partition("; error bars")[0] for name, drawn in figures.items()}
    own = f"made_up, budget smoke, 188.4K to 1.909M tokens, 1 to 2 seeds, depthlm {depthlm.__version__}"
    beside = f"ours: {own}; not comparable with the paper's numbers"
    assert stamps == {figure: own if figure == "scaling" else beside, "equal_cost": own, "loss_curves": own}
    assert "budget smoke with a changed protocol, " in replace(sweep(of, "smoke"), changed=["size=micro"]).stamp()


@pytest.mark.parametrize("figure", ["lines", "scaling"])
def test_series_with_long_names_or_an_underscore_have_entries_of_their_own(figure, monkeypatch):
    names = ["a name that is as long as what a sweep over many settings has, 4", "_mine"]
    names.append(f"{names[0][:-1]}8")
    points = [
        {"label": name, "model": "vanilla", "size.num_layers": [2, 4], "optimizer.lr": 0.1 + n}
        for n, name in enumerate(names)
    ]
    of = experiment(points=points, columns=LOSS, figure=figure, x="size.num_layers", series="optimizer.lr")
    for directory in directories(of):
        write_run(directory)
    figures = keep_figures(monkeypatch)
    reported(of)
    (legend,) = figures[figure].legends
    assert len({text.get_text() for text in legend.get_texts()}) == 3


def test_the_colour_of_a_mechanism_is_that_of_its_class():
    def colour_of(**settings: str) -> str:
        chosen = {name.replace("__", "/"): value for name, value in settings.items()}
        point = Point([f"{name}={value}" for name, value in (chosen or {"model": "vanilla"}).items()], chosen)
        return mechanism_of(Row([point], [], {})).colour

    assert colour_of(model="grn_v1") == DeepCrossAttention.colour
    assert colour_of(model="uniform_mix") == colour_of(model__attention="depth_attention") == DepthAttention.colour
    assert colour_of() == Residual.colour
    assert colour_of(model__connection="dca", model__attention="depth_attention") == DeepCrossAttention.colour
    assert colour_of(model__connection="rezero", model__attention="moda") == Moda.colour
    assert colour_of(model__connection="rezero") in OTHERS
