"""The slopes of the study of depth, and what they are computed from."""

import hashlib
import itertools
import json
import math
import re
from statistics import fmean, stdev

import numpy as np
import pytest

from docs.results.analysis import depth
from docs.results.analysis.archive import ARCHIVE, RESULTS
from docs.results.analysis.depth import Study, slope

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
    return Study(losses, parameters, dict.fromkeys(losses, 0.0))


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("question", "f86251e70854e13c61b0aeb8ddac4bab1da994e5e81c88f0efc354affab79141"),
        ("question_completep", "f40a5b932b8a687fd9eeddf7677eb479eff2b441f46d3e8386de203adb7675ff"),
    ],
)
def test_the_questions_do_not_change_with_the_results(name, digest):
    assert hashlib.sha256((RESULTS / f"{name}.md").read_bytes()).hexdigest() == digest


def test_a_slope_is_the_change_per_doubling_with_its_interval():
    gaps = {(layers, seed): 0.3 - 0.05 * math.log2(layers) for layers, seed in itertools.product(LAYERS, SEEDS)}
    exact = slope(gaps)
    assert (exact.mean, exact.low) == pytest.approx((-0.05, -0.05))
    rng = np.random.default_rng(1)
    noisy = {place: gap + rng.normal(0, 0.05) for place, gap in gaps.items()}
    found = slope(noisy)
    # the normal equations, and the table of Student's t for ten degrees of freedom
    x = np.array([[1.0, math.log2(layers)] for layers, _ in noisy])
    y = np.array([*noisy.values()])
    line = np.linalg.solve(x.T @ x, x.T @ y)
    half = 2.228 * math.sqrt(((y - x @ line) ** 2).sum() / 10 * np.linalg.inv(x.T @ x)[1, 1])
    assert (found.mean, found.low, found.high) == pytest.approx((line[1], line[1] - half, line[1] + half), rel=1e-4)


def test_the_answers_find_a_gain_of_learned_reads_and_none_without_it():
    shape, means, *_ = depth.answers(made_up(0.05)).rows
    assert [cell.bold for cell in shape] == [False, True, False, True, True, False, True]
    assert [cell.bold for cell in means] == [False, True, False, True, False, False, False]
    assert not any(cell.bold for row in depth.answers(made_up()).rows for cell in row)


def recorded(model: str) -> dict[tuple[int, int], dict[float, dict[int, float]]]:
    """The losses of a mechanism in the committed records, by layers and width of the MLP, then by rate and seed."""
    losses: dict[tuple[int, int], dict[float, dict[int, float]]] = {}
    for line in map(json.loads, (ARCHIVE / "depth.jsonl").read_text().splitlines()):
        if "settings" in line and line["settings"]["model.name"] == model:
            settings = line["settings"]
            shape = settings["size.num_layers"], settings["size.intermediate_size"]
            by_seed = losses.setdefault(shape, {}).setdefault(settings["optimizer.lr"], {})
            by_seed[settings.get("seed", 1)] = line["summary"]["validation_loss"]
    return losses


def drawn(*models: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean gaps of mechanisms to vanilla [depth, seed], and draws of the luck of the choices [depth, draw]."""
    rng, gaps, luck = np.random.default_rng(1), np.zeros((4, 3)), np.zeros((4, 20_000))
    for name, weight in (*((model, 1 / len(models)) for model in models), ("vanilla", -1.0)):
        every = recorded(name)
        reports = [by_seed for rates in every.values() for by_seed in rates.values() if 1 in by_seed]
        error = math.sqrt(fmean(stdev(by_seed[seed] for seed in (1, 2, 3)) ** 2 for by_seed in reports))
        for place, shape in enumerate([(6, 153), (12, 128), (24, 87), (48, 67)]):
            chosen = next(by_seed for by_seed in every[shape].values() if 1 in by_seed)
            gaps[place] += weight * np.array([chosen[seed] for seed in (1, 2, 3)])
            first = np.array([by_seed[11] for by_seed in every[shape].values()])
            luck[place] += weight * first[rng.normal(first, error, (luck.shape[1], len(first))).argmin(1)]
    return gaps, luck


def printed(block: str, row: str, column: int) -> list[float]:
    """A number of the page's tables with the ends of its interval."""
    text = (RESULTS / "tables.md").read_text().partition(f"<!-- {block} -->")[2].partition("<!-- end -->")[0]
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    (cell,) = [line[column + 1] for line in lines if len(line) > 1 and line[1] == row]
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", cell)]


@pytest.mark.parametrize(
    ("models", "block", "row", "column"),
    [
        (["attention_residuals"], "differences", "attention_residuals", 6),
        (["dca"], "differences", "dca", 6),
        ([model for model in depth.LEARNED if model != "mudd"], "answers", "minus vanilla, without mudd", 1),
    ],
)
def test_the_slopes_of_the_page_are_those_of_a_computation_from_the_records_alone(models, block, row, column):
    gaps, luck = drawn(*models)
    x = np.log2([6, 12, 24, 48])
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    expected = float(weights @ gaps.mean(1))
    residuals = gaps - gaps.mean() - expected * (x - x.mean())[:, None]
    error = math.sqrt((residuals**2).sum() / 10 / 3 / ((x - x.mean()) ** 2).sum())
    # the table of Student's t for ten degrees of freedom
    half = math.hypot(2.228 * error, 1.96 * float(np.std(weights @ luck)))
    assert printed(block, row, column) == pytest.approx([expected, expected - half, expected + half], abs=4e-4)


def test_a_mean_of_the_page_is_that_of_a_computation_from_the_records_alone():
    gaps, luck = drawn("denseformer")
    error = math.sqrt(gaps.var(1, ddof=1).mean() / 12)
    # the table of Student's t for eight degrees of freedom
    half = math.hypot(2.306 * error, 1.96 * float(np.std(luck.mean(0))))
    mean = float(gaps.mean())
    assert printed("differences", "denseformer", 5) == pytest.approx([mean, mean - half, mean + half], abs=1e-3)
