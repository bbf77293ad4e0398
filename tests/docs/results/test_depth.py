"""The slopes of the study of depth, and what they are computed from."""

import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from docs.results.analysis import depth
from docs.results.analysis.archive import RESULTS
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
    return Study(losses, parameters)


def test_the_question_does_not_change_with_the_results():
    text = Path(RESULTS / "question.md").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "f86251e70854e13c61b0aeb8ddac4bab1da994e5e81c88f0efc354affab79141"


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
