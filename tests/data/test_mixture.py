from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthlm.data import Batches, DataError, TokenFiles, loader
from depthlm.data.mixture import schedule, shares
from depthlm.data.preparation.progress import SplitWriter

WEIGHTS = st.lists(st.one_of(st.integers(1, 200), st.integers(1, 40).map(lambda n: n / 8)), min_size=1, max_size=8)


def counts(weights: tuple[float, ...], samples: int) -> np.ndarray:
    """Return how many of the first 1, 2, ... samples come from each source, [k, samples]."""
    sources, _ = schedule(weights).locate(np.arange(samples))
    return np.stack([np.cumsum(sources == index) for index in range(len(weights))])


@given(WEIGHTS)
def test_every_prefix_has_the_requested_shares_to_within_one_sample(weights):
    samples = 5000
    seen = counts(tuple(weights), samples)
    for index, share in enumerate(shares(weights)):
        # exact: |count - n * share| < 1
        scaled = seen[index] * share.denominator - np.arange(1, samples + 1) * share.numerator
        assert np.abs(scaled).max() < share.denominator


def test_weights_without_a_short_period_are_an_error_that_suggests_rounded_weights():
    with pytest.raises(DataError, match=r"no common denominator .* Round them, for example to 97\d+, 2\d+") as caught:
        shares([3710123456789, 83123456781, 0.5])
    rounded = [float(number) for number in caught.value.remedy.removesuffix(".").split("example to ")[1].split(", ")]
    assert np.abs(counts(tuple(rounded), 1000)).max() <= 1000


def test_a_weight_is_the_decimal_number_or_the_simple_fraction_that_was_meant():
    assert shares([n / 7 for n in (1, 2, 4)]) == [Fraction(n, 7) for n in (1, 2, 4)]
    assert shares([0.1, 0.2, 0.7]) == [Fraction(1, 10), Fraction(1, 5), Fraction(7, 10)]


@given(WEIGHTS, st.integers(0, 10**12), st.integers(1, 100))
def test_a_sample_is_a_pure_function_of_its_number(weights, first, count):
    plan, numbers = schedule(tuple(weights)), first + np.arange(count)
    source, place = plan.locate(numbers)
    for offset in range(0, count, 7):
        alone = plan.locate(numbers[offset : offset + 1])
        assert (alone[0][0], alone[1][0]) == (source[offset], place[offset])
    # the samples of one source are numbered without a gap, after those before `first`
    before = plan.count_seen(first)
    for index in range(len(weights)):
        mine = place[source == index]
        assert mine.tolist() == list(range(before[index], before[index] + len(mine)))


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, TokenFiles]:
    """Three sources whose tokens identify their source."""
    files_by_source = {}
    for index, (name, count) in enumerate({"web": 3001, "code": 301, "maths": 61}.items()):
        writer = SplitWriter(tmp_path, name, "uint16", 40_000, 700)
        writer.add(10_000 * index + np.arange(count), 1, 1)
        files_by_source[name] = TokenFiles(tmp_path, writer.finish().files, "uint16")
    return files_by_source


SETTINGS = {"sequence_length": 10, "batch_size": 12, "seed": 3, "weights": {"web": 0.7, "code": 0.25, "maths": 0.05}}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_order_is_the_same_for_any_number_of_ranks_and_workers_and_from_any_step(sources):
    whole = [Batches(sources, **SETTINGS)[step].flatten(0, 1) for step in range(20)]
    for ranks, workers, first in ((1, 2, 0), (4, 0, 0), (2, 2, 7)):
        shares_of = [Batches(sources, **SETTINGS, micro_batch=3, rank=rank, ranks=ranks) for rank in range(ranks)]
        loaders = [loader(batches, first, 20, num_workers=workers) for batches in shares_of]
        for step, parts in enumerate(zip(*loaders, strict=True), first):
            assert torch.equal(torch.cat(parts).flatten(0, 1), whole[step])


def test_each_source_has_every_token_as_a_target_once_in_each_of_its_epochs(sources):
    batches = Batches(sources, **SETTINGS)
    targets = torch.cat([batches[step].flatten(0, 1)[:, 1:] for step in range(80)])
    for index, (name, tokens) in enumerate(sources.items()):
        mine = targets[targets[:, 0] // 10_000 == index] - 10_000 * index
        per_epoch = (len(tokens) - 1) // 10
        assert len(mine) / per_epoch == pytest.approx(batches.count_seen(80)[name][1])
        for start in range(0, len(mine) - per_epoch + 1, per_epoch):
            assert sorted(mine[start : start + per_epoch].flatten().tolist()) == list(range(1, len(tokens)))


def test_a_source_keeps_its_order_when_another_joins(sources):
    def order(names: list[str]) -> list[int]:
        weights = dict.fromkeys(names, 1.0)
        batches = Batches({name: sources[name] for name in names}, **(SETTINGS | {"weights": weights}))
        tokens = torch.cat([batches[step].flatten(0, 1)[:, 0] for step in range(12)])
        return tokens[tokens < 10_000].tolist()[:40]

    assert order(["web", "code"]) == order(["maths", "web", "code"])
