"""The loss curves of a report: their panels, and what they draw."""

import numpy as np
import pytest

from depthlm.report.figures.loss_curves import (
    Line,
    mean_line,
    panels_of,
)

from ..pictures import keep_figures
from .made_up import SECONDS, directories, experiment, reported, sweep, write_run

BOTH = {"model": ["vanilla", "dca"]}


@pytest.mark.parametrize(
    ("points", "titles", "names"),
    [
        # the names of the tasks in the experiment
        (
            [BOTH | {"task": "shallow", "size.num_layers": 2}, BOTH | {"task": "deep", "size.num_layers": 4}],
            ["shallow", "deep"],
            ["vanilla", "dca"],
        ),
        # without names, the sizes are the panels: here the configurations have one
        ([{"label": "vanilla", "model": "vanilla", "size.num_layers": [2, 4]}], ["tiny"], ["2", "4"]),
    ],
)
def test_a_panel_is_named_by_what_distinguishes_its_task(points, titles, names):
    panels = panels_of(sweep(experiment(points=points)))
    assert [panel.title.partition(": ")[0] for panel in panels] == titles
    assert list(panels[0].rows) == names


@pytest.mark.parametrize(
    ("over", "places", "title"),
    [
        ("tokens", [10_000, 20_000, 30_000, 40_000], "tokens"),
        ("time", np.linspace(0.25, 1, 4) * SECONDS, "training time (seconds)"),
    ],
)
def test_validation_curves_have_a_point_for_each_validation(monkeypatch, over, places, title):
    of = experiment(points=[{"label": name, "model": name} for name in ("vanilla", "dca")], curves=[over])
    vanilla, dca = directories(of)
    write_run(vanilla, 3.0)
    write_run(dca, 2.5, done=0.5)
    figures = keep_figures(monkeypatch)
    text = reported(of)
    assert (
        f"## Validation perplexity over {over}\n\n![Validation perplexity over {over}](perplexity_over_{over}.png)"
        in text
    )
    (axes,) = [axes for axes in figures[f"perplexity_over_{over}"].axes if axes.lines]
    assert axes.get_xlabel() == title
    complete, incomplete = axes.lines[0].get_xydata(), axes.lines[1].get_xydata()
    np.testing.assert_allclose(complete[:, 0], places)
    np.testing.assert_allclose(np.log(complete[:, 1]), 3.0 + 2.5 * np.exp(-9 * np.arange(0.25, 1.25, 0.25)))
    np.testing.assert_allclose(incomplete[:, 0], places[:2])
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"vanilla", "dca (stopped, step 20)"}


def test_validations_of_seeds_are_averaged_although_they_take_place_at_different_times():
    quick, slow = Line(np.array([1.0, 2.0]), np.array([9.0, 7.0])), Line(np.array([5.0, 10.0]), np.array([8.0, 5.0]))
    (seconds, mean), perplexities = mean_line([quick, slow], paired=True)
    np.testing.assert_array_equal([seconds, mean], [[3.0, 6.0], [8.5, 6.0]])
    np.testing.assert_array_equal(perplexities, [[9.0, 7.0], [8.0, 5.0]])
    # one of the runs has lost its first validation
    (seconds, mean), _ = mean_line([slow, Line(np.array([6.0, 7.0, 10.0]), np.array([9.0, 8.0, 7.0]))], paired=True)
    np.testing.assert_array_equal([seconds, mean], [[10.0], [6.0]])


def test_training_losses_of_seeds_are_averaged_at_the_same_tokens():
    # each has a row more where it was stopped
    ours = Line(np.array([10.0, 13.0, 20.0, 30.0]), np.array([4.0, 3.7, 3.0, 2.0]))
    other = Line(np.array([10.0, 20.0, 27.0, 30.0]), np.array([6.0, 5.0, 4.3, 4.0]))
    (tokens, mean), _ = mean_line([ours, other])
    np.testing.assert_allclose([tokens, mean], [[10, 13, 20, 30], [5.0, 4.7, 4.0, 3.0]])


def test_the_legend_of_many_curves_has_the_lowest_of_each_mechanism(monkeypatch):
    rates = [round(0.001 * number, 3) for number in range(1, 14)]
    of = experiment(points=[{"model": ["vanilla", "dca"], "optimizer.lr": rates, "task": "one"}])
    for number, directory in enumerate(directories(of)):
        write_run(directory, 3.0 + 0.01 * number)
    figures = keep_figures(monkeypatch)
    assert "the legend has the lowest of each mechanism" in reported(of)
    (axes,) = [axes for axes in figures["loss_curves"].axes if axes.lines]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dca", "vanilla"]
