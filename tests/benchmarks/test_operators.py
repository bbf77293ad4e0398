"""The floors of the operators of benchmarks/kernels.py."""

import torch

from benchmarks.shared import operators
from benchmarks.shared.operators import CASES, Make, Shape

TINY = Shape(batch=1, length=3, d=16, layers=4, h=4, k=2, e=16, entries=2)
PARAMETERS = {"depth_attend_block": 1, "depth_attend_full": 1, "weighted_reads": 1, "gated_reads": 2}


def test_floors_equal_those_counted_by_hand():
    # 3b: 32 query and 8 key/value heads of 64, D 2048
    assert operators.value_mix_values(n=3, h=32, k=8, e=64) == 3 * (2048 + 3 * 1024) + 2 * 512 == 16_384
    assert operators.reads_values(s=8, n=49, d=2048) == 3 * 100_352 + 2 * 16_384 == 333_824
    assert operators.streams_values(n=4, d=2048) == 25 * 2048 == 51_200
    assert operators.depth_part_values(n=48, h=32, k=8, e=64) == 7 * 2048 + 3 * 48 * 1024 == 161_792

    # of reads: the inputs three times, and the outputs twice
    for name, parameters in PARAMETERS.items():
        case = CASES[name](TINY, Make(torch.Generator().manual_seed(0), torch.float32))
        inputs = sum(x.numel() for x in case.inputs[parameters:])
        assert case.values * TINY.batch * TINY.length == 3 * inputs + 2 * case.run()[0].numel(), name
