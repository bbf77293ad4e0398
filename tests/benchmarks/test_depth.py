"""The slopes of the study of depth, and what they are computed from."""

import hashlib
import itertools
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from benchmarks.study import depth
from benchmarks.study.archive import RESULTS
from benchmarks.study.depth import Study, between_mechanisms, group_gaps, slope
from benchmarks.study.pictures import draw_differences, draw_interventions, draw_slopes

LAYERS, SEEDS = (6, 12, 24, 48), ("1", "2", "3")
EVERY = [*depth.STATIC, *depth.LEARNED]


def made_up(gain: float = 0.0, **offsets: float) -> Study:
    """Return a study in which each learned mechanism gains with each doubling of the depth, and no static one does.

    offsets: of the losses of mechanisms, at all depths.
    """
    rng = np.random.default_rng(0)
    losses = {("vanilla", layers): {seed: 2.7 + rng.normal(0, 0.02) for seed in SEEDS} for layers in LAYERS}
    for model, layers in itertools.product(EVERY, LAYERS):
        mean = offsets.get(model, 0.0) - gain * math.log2(layers / 6) * (model in depth.LEARNED)
        vanilla = losses["vanilla", layers]
        losses[model, layers] = {seed: loss + mean + rng.normal(0, 0.01) for seed, loss in vanilla.items()}
    parameters = dict.fromkeys(losses, 1000)
    for layers in LAYERS:
        losses["vanilla, wider", layers] = {seed: 0.9 * loss for seed, loss in losses["vanilla", layers].items()}
        parameters["vanilla, wider", layers] = 2000
    return Study(list(losses), losses, parameters)


def test_the_question_does_not_change_with_the_results() -> None:
    text = Path(RESULTS / "question.md").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "f86251e70854e13c61b0aeb8ddac4bab1da994e5e81c88f0efc354affab79141"


def test_a_slope_is_the_change_per_doubling_with_its_interval() -> None:
    gaps = {(layers, seed): 0.3 - 0.05 * math.log2(layers) for layers, seed in itertools.product(LAYERS, SEEDS)}
    exact = slope(gaps, LAYERS)
    assert exact is not None
    assert (exact.mean, exact.low) == pytest.approx((-0.05, -0.05))
    rng = np.random.default_rng(1)
    noisy = {place: gap + rng.normal(0, 0.05) for place, gap in gaps.items()}
    found = slope(noisy, LAYERS)
    # the normal equations, and the table of Student's t for ten degrees of freedom
    x = np.array([[1.0, math.log2(layers)] for layers, _ in noisy])
    y = np.array([*noisy.values()])
    line = np.linalg.solve(x.T @ x, x.T @ y)
    half = 2.228 * math.sqrt(((y - x @ line) ** 2).sum() / 10 * np.linalg.inv(x.T @ x)[1, 1])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((line[1], line[1] - half, line[1] + half), rel=1e-4)


def test_the_answers_find_a_gain_of_learned_reads_and_none_without_it() -> None:
    shape, means, *_ = depth.answers(made_up(0.05)).rows
    assert [cell.bold for cell in shape] == [False, True, False, True, True, False, True]
    assert [cell.bold for cell in means] == [False, True, False, True, False, False, False]
    assert not any(cell.bold for row in depth.answers(made_up()).rows for cell in row)


def test_vanilla_with_more_parameters_lies_on_the_power_law_through_its_neighbours() -> None:
    names = zip(("vanilla", *depth.WIDER), (1000, 1500, 3200), strict=True)
    parameters = {(name, 48): count for name, count in names}
    losses = {place: dict.fromkeys(SEEDS, 5.0 * count**-0.1) for place, count in parameters.items()}
    study = Study(list(losses), losses, parameters)
    for count in (1000, 1200, 1500, 2000, 3200, 3300):
        assert study.vanilla_with(48, count)["2"] == pytest.approx(5.0 * count**-0.1)


def test_differences_at_equal_parameters_are_from_a_larger_vanilla() -> None:
    study = made_up()
    study = replace(study, parameters=dict.fromkeys(study.losses, 2000) | {("vanilla", n): 1000 for n in LAYERS})
    gaps, equal = (study.gaps("mudd", equal) for equal in (False, True))
    base = study.losses["vanilla", 12]["1"]
    assert equal[12, "1"] - gaps[12, "1"] == pytest.approx(0.1 * base)


def test_a_mechanism_left_out_at_a_depth_does_not_turn_its_level_into_a_slope_of_the_group() -> None:
    study, left_out = made_up(mhc=0.8), [("mhc", 48)]
    complete, found = (slope(group_gaps(study, depth.LEARNED, without=w), LAYERS) for w in ((), left_out))
    assert complete is not None
    assert found is not None
    assert found.mean == pytest.approx(complete.mean, abs=0.002)
    singles = [study.slope(model, without=left_out) for model in depth.LEARNED]
    assert found.mean == pytest.approx(fmean(line.mean for line in singles if line is not None))


def test_a_mechanism_is_in_question_if_its_mean_may_be_zero_or_its_sign_changes() -> None:
    level = {(n, seed): 0.05 + 0.001 * float(seed) for n, seed in itertools.product(LAYERS, SEEDS)}
    study = made_up()
    better, incomplete = {place: -gap for place, gap in level.items()}, {x: y for x, y in level.items() if x[0] < 48}
    assert not any(depth.is_in_question(study, gaps) for gaps in (level, better, incomplete))
    changing = {place: gap if place[0] > 6 else -0.01 for place, gap in level.items()}
    unclear = {(n, seed): -0.19 + 0.1 * float(seed) for n, seed in level}
    assert all(depth.is_in_question(study, gaps) for gaps in (changing, unclear))


def test_the_means_over_depths_and_over_mechanisms_have_intervals_of_student() -> None:
    gaps = {(n, seed): 0.1 * place + 0.01 * float(seed) for place, n in enumerate(LAYERS) for seed in SEEDS}
    found = depth.over_depths(made_up(), gaps)
    assert found is not None
    # the table of Student's t for eight degrees of freedom
    assert (found.mean, found.high - found.mean) == pytest.approx((0.17, 2.306 * 0.01 / math.sqrt(12)), rel=1e-3)
    found = depth.over_mechanisms([depth.Difference(x, x, x, 12, False) for x in (0.1, 0.2, 0.6)])
    assert found is not None
    # the table of Student's t for two degrees of freedom
    assert (found.mean, found.high) == pytest.approx((0.3, 0.3 + 4.303 * math.sqrt(0.07 / 3)), rel=1e-3)
    assert depth.over_mechanisms([found, None]) is None


def test_the_interval_of_two_groups_over_mechanisms_is_welchs() -> None:
    slopes = [[0.1, 0.2, 0.4], [0.5, 0.9, 0.8, 1.0]]
    found = between_mechanisms(*([depth.Difference(x, x, x, 12, False) for x in group] for group in slopes))
    means, errors = [np.mean(g) for g in slopes], [np.var(g, ddof=1) / len(g) for g in slopes]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(g) - 1) for e, g in zip(errors, slopes, strict=True))
    from scipy.stats import t

    half = t.ppf(0.975, freedom) * math.sqrt(sum(errors))
    assert found is not None
    assert (found.mean, found.high) == pytest.approx((means[0] - means[1], means[0] - means[1] + half))


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    study = made_up(0.05)
    draw_differences(study, tmp_path / "differences.png", "")
    draw_slopes(study, tmp_path / "slopes.png", "")
    lines = [{"loss": 2.0, "rank": 0.5, "means": 2.1, "kept 2": 2.2}, {"loss": 2.0, "rank": None, "means": 2.1}]
    draw_interventions({"dca": lines, "mhc_hunyuan_v4": [{"loss": 2.0}]}, tmp_path / "interventions.png", "")
    assert {path.stat().st_size > 10_000 for path in tmp_path.iterdir()} == {True}
