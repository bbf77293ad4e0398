"""The analysis of the study of CompleteP, on made-up losses whose answers are known."""

import itertools
import json
import math

import numpy as np
import pytest

from depthlm.report.rows import Measured
from depthlm.sweeps.points import check_points
from docs.results.analysis import completep
from docs.results.analysis.archive import ARCHIVE
from docs.results.analysis.completep import LABELS, LAYERS, MECHANISMS, SEEDS, Study, chance_of, holm
from docs.results.analysis.pictures import draw_completep

from ...pictures import keep_figures
from .test_depth import printed


def made_up(gains: dict[str, tuple[float, float]], noise: float = 0.004, luck: float = 0.0) -> Study:
    """Losses of vanilla with twelve seeds, and of mechanisms with their gains in both parametrizations."""
    rng, losses = np.random.default_rng(1), {}
    for label, layers in itertools.product(LABELS, LAYERS):
        losses["vanilla", label, layers] = {str(seed): 3.5 + rng.normal(0, noise) for seed in range(1, 13)}
        for model, by_label in gains.items():
            gain = by_label[LABELS.index(label)]
            vanilla = losses["vanilla", label, layers]
            losses[model, label, layers] = {seed: vanilla[seed] - gain + rng.normal(0, noise) for seed in SEEDS}
    return Study(losses, dict.fromkeys(losses, luck), dict.fromkeys(losses, "0.012"))


def test_the_answers_are_repair_additive_synergy_and_what_else_may_be_said():
    gains = dict(zip(MECHANISMS, [(0.1, 0.01), (0.1, 0.08), (0.05, 0.1), (0.0, -0.06)], strict=True))
    *rows, control = completep.results(made_up(gains)).rows
    assert [row[-1].text for row in rows] == ["repair", "additive", "synergy", "CompleteP makes the difference larger"]
    # the change of the second is shown too, that of the control is not
    assert [row[3].bold for row in (*rows, control)] == [True, True, True, True, False]
    assert rows[-1][-2].text == "–"


def test_missing_runs_are_dashes_and_nothing_is_answered_before_the_control():
    study = made_up({"value_residual": (0.1, 0.01)})
    del study.losses["vanilla", "standard", 24]
    assert {cell.text for row in completep.results(study).rows for cell in row[1:]} == {"–"}
    places = completep.places(study).rows
    assert places[0][2].text == "–"
    assert places[0][1].text.startswith("0.012, 3.5")


def test_nothing_is_answered_where_the_control_differs():
    study = made_up(dict.fromkeys(MECHANISMS, (0.1, 0.01)))
    for layers in LAYERS:
        losses = study.losses["vanilla", "CompleteP", layers]
        losses |= {seed: loss + 0.1 for seed, loss in losses.items() if seed not in SEEDS}
    *rows, _ = completep.results(study).rows
    assert {row[-1].text for row in rows} == {"none: the control differs"}
    assert not any(row[3].bold for row in rows)


def test_the_luck_of_all_eight_cells_is_in_the_interaction_and_none_in_the_control():
    study = made_up({"dca": (0.1, 0.05)}, luck=0.01)
    assert study.compare("dca").interaction.luck == pytest.approx(math.sqrt(8) * 0.01 / 2)
    assert study.compare("control").interaction.luck == 0


def test_a_depth_whose_seeds_differ_much_is_also_left_out():
    study = made_up(dict.fromkeys(MECHANISMS, (0.1, 0.01)))
    study.losses["dca", "standard", 24]["3"] += 1.0
    *_, line = completep.results(study).rows
    assert [line[0].text, line[-1].text] == ["dca, 12 layers alone", "repair"]


def test_the_points_of_the_study_are_allowed_and_have_its_cells():
    points = check_points(["experiment=depthlm/completep"])
    found = {(p.settings["model"], p.settings["parametrization"], p.settings["size.num_layers"]) for p in points}
    expected = itertools.product(("vanilla", *MECHANISMS), ("standard", "completep"), map(str, LAYERS))
    assert found == set(expected)
    assert {p.seed for p in points} == {"21", "22"}


def test_the_picture_has_a_row_for_each_mechanism_whose_runs_are_complete(tmp_path, monkeypatch):
    figures = keep_figures(monkeypatch)
    draw_completep(made_up({"dca": (0.1, 0.05), "value_residual": (0.1, 0.01)}), tmp_path / "completep.png", "stamp")
    panel = figures["completep"].axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["value_residual", "dca", "control: vanilla"]


def test_a_share_has_fiellers_interval():
    arm = made_up({"value_residual": (0.1, 0.05)}, noise=0.02, luck=0.01).compare("value_residual")
    share, low, high = arm.share
    assert low < share < high
    assert share == pytest.approx(arm.gap("CompleteP").mean / arm.gap("standard").mean)
    for end in (low, high):
        # at the ends, the difference of the two may be just 0
        gaps = np.subtract(arm.gaps["CompleteP"], np.multiply(end, arm.gaps["standard"]))
        luck = math.hypot(arm.luck["CompleteP"], end * arm.luck["standard"])
        number = Measured(gaps.mean(), gaps.std(ddof=1), 6, luck=luck)
        assert abs(number.mean) == pytest.approx(number.interval)


def test_a_chance_is_that_of_the_interval_that_ends_at_zero():
    number = Measured(0.03, 0.02, 6, luck=0.005)
    assert number.half_width(1 - chance_of(number)) == pytest.approx(0.03)
    assert chance_of(Measured(0.1, 5e-4, 6)) == 0
    # Student's t of five degrees of freedom at 2.571 is the two-sided 5%
    assert chance_of(Measured(2.5706 / math.sqrt(6), 1.0, 6)) == pytest.approx(0.05, rel=1e-3)


def test_holm_stops_at_the_first_comparison_that_is_not_shown():
    # the limits are 0.0125, 0.0167, 0.025 and 0.05
    assert holm({"a": 0.001, "b": 0.03, "c": 0.04, "d": 0.016}) == {"a", "d"}
    assert holm({"a": 0.001, "b": 0.02, "c": 0.04, "d": 0.016}) == {"a", "b", "c", "d"}


def drawn(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The gaps to vanilla by parametrization [label, seed], and draws of the luck of the choices [label, draw]."""
    cells: dict[tuple[str, str, int], dict[float, dict[int, float]]] = {}
    for line in map(json.loads, (ARCHIVE / "completep.jsonl").read_text().splitlines()):
        values = line["settings"]
        place = values["model.name"], values.get("parametrization.name", "standard"), values["size.num_layers"]
        by_seed = cells.setdefault(place, {}).setdefault(values["optimizer.lr"], {})
        by_seed[values.get("seed", 1)] = line["summary"]["validation_loss"]
    rng, gaps, luck = np.random.default_rng(1), np.zeros((2, 6)), np.zeros((2, 200_000))
    for model, sign, first in ((name, 1, 1), ("vanilla", -1, 1)):
        if model == "control":
            model, first = "vanilla", 7
        reports = [r for place in cells if place[0] == model for r in cells[place].values() if 1 in r]
        variances = [np.var([loss for seed, loss in report.items() if seed < 20], ddof=1) for report in reports]
        for label, layers in itertools.product((0, 1), LAYERS):
            by_rate = cells[model, ("standard", "completep")[label], layers]
            (chosen,) = [losses for losses in by_rate.values() if 1 in losses]
            gaps[label] += sign * np.array([chosen[first + seed] for seed in range(6)]) / 2
            means = np.array([(losses[21] + losses[22]) / 2 for losses in by_rate.values()])
            noise = rng.normal(means, math.sqrt(np.mean(variances)), (luck.shape[1], len(means)))
            luck[label] += (name != "control") * sign * means[noise.argmin(1)] / 2
    return gaps, luck


@pytest.mark.parametrize("name", [*MECHANISMS, "control"])
def test_the_answers_of_the_page_are_those_of_a_computation_from_the_records_alone(name):
    if not (shown := printed("completep", name, 3)):
        pytest.skip("its runs are not complete")
    (standard, rescaled), (luck, other) = drawn(name)

    def half_width(values: np.ndarray, chance: np.ndarray) -> float:
        # the table of Student's t for five degrees of freedom
        return math.hypot(2.571 * values.std(ddof=1) / math.sqrt(6), 1.96 * float(chance.std()))

    change = rescaled - standard
    half = half_width(change, other - luck)
    assert shown == pytest.approx([change.mean(), change.mean() - half, change.mean() + half], abs=1.5e-3)
    if share := printed("completep", name, 4):
        # the shares with which the gain that is left may be 0
        possible = [
            r
            for r in np.arange(-5, 5, 0.005)
            if abs((rescaled - r * standard).mean()) <= half_width(rescaled - r * standard, other - r * luck)
        ]
        assert share == pytest.approx([rescaled.mean() / standard.mean(), possible[0], possible[-1]], abs=0.03)
