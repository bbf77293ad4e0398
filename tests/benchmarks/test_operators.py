"""The operators of benchmarks/kernels.py: their floors, their inputs, and a paper's settings."""

import pytest
import torch

from benchmarks.shared import operators
from benchmarks.shared.operators import CASES, Make, Shape, read_table

TINY = Shape(batch=1, length=3, d=16, layers=4, h=4, k=2, e=16, entries=2)
PARAMETERS = {"depth_attend_block": 1, "depth_attend_full": 1, "weighted_reads": 1, "gated_reads": 2}


def make() -> Make:
    return Make(torch.Generator().manual_seed(0), torch.float32)


def test_floors_equal_those_counted_by_hand():
    # 3b: 32 query and 8 key/value heads of 64, D 2048
    assert operators.value_mix_values(n=3, h=32, k=8, e=64) == 3 * (2048 + 3 * 1024) + 2 * 512 == 16_384
    assert operators.reads_values(s=8, n=49, d=2048) == 3 * 100_352 + 2 * 16_384 == 333_824
    assert operators.streams_values(n=4, d=2048) == 25 * 2048 == 51_200
    assert operators.depth_part_values(n=48, h=32, k=8, e=64) == 7 * 2048 + 3 * 48 * 1024 == 161_792

    # of reads: the inputs three times, and the outputs twice
    for name, parameters in PARAMETERS.items():
        case = CASES[name](TINY, make())
        inputs = sum(x.numel() for x in case.inputs[parameters:])
        assert case.values * TINY.batch * TINY.length == 3 * inputs + 2 * case.run()[0].numel(), name


def test_the_thirteen_settings_of_moda_are_consistent():
    rows = read_table("moda_efficiency")
    assert [row["row"] for row, _ in rows] == [*range(1, 14)]
    assert [(shape.length, shape.h, shape.k, shape.e, shape.entries) for _, shape in rows] == [
        *((2**i, 64, 8, 64, 64) for i in range(12, 17)),
        *((2**14, 8 * groups, 8, 64, 64) for groups in (2, 4, 8, 16, 32)),
        *((2**14, 64, 8, 64, entries) for entries in (64, 128, 256)),
    ]
    for row, shape in rows:
        assert shape.h == shape.k * row["groups"]
        # the paper's percentages are relative to MoDA's time
        assert 100 * (1 - row["flash_ms"] / row["moda_ms"]) == pytest.approx(row["extra_time_percent"], abs=0.01)
        assert 100 * row["groups"] / 64 == pytest.approx(row["depth_utilization"], abs=0.01)
    added = [row["moda_ms"] / row["flash_ms"] - 1 for row, _ in rows]
    assert added[0] == pytest.approx(0.349, abs=5e-4)
    assert added[4] == pytest.approx(0.028, abs=5e-4)
