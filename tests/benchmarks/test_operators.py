"""The operators of benchmarks/kernels.py: their floors, their inputs, and a paper's settings."""

import pytest
import torch

import depthlm
from benchmarks.shared import operators
from benchmarks.shared.operators import CASES, Make, Shape, difference, read_table, shape_of, step
from depthlm.config import compose_anywhere
from depthlm.mechanisms.attention_residuals import AttentionResiduals
from depthlm.mechanisms.dca import DeepCrossAttention

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


@pytest.mark.parametrize("name", ["depth_value_mix", "gated_reads", "merged_attention"])
def test_triton_and_pytorch_agree_on_the_inputs(name):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the benchmark compares them itself")
    case = CASES[name](TINY, make())
    actual, expected = (step(case.run, case.inputs, kernels)() for kernels in ("triton", "torch"))
    assert len(actual) == len(case.run()) + len(case.inputs)
    assert difference(actual, expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "model", "kind"),
    [
        ("depth_attend_full", "attention_residuals_full", AttentionResiduals),
        ("gated_reads", "dca", DeepCrossAttention),
    ],
)
def test_numbers_of_reads_and_sources_equal_those_of_the_decoder(name, model, kind):
    decoder = depthlm.build_model(compose_anywhere(["size=1.5b", f"model={model}"]), "meta")
    middle = [x for x in decoder.modules() if isinstance(x, kind) and x.spec.layer == decoder.size.num_layers // 2]
    phases = [(x, x.read_ahead) for x in middle if x.read_ahead is not None]
    # a phase of one sublayer belongs to a sublayer without reads
    ahead = next(phase for x, phase in phases if phase.readers[0] is x and len(phase.readers) > 1)
    reads = sum(getattr(x, "num_inputs", 1) for x in ahead.readers)
    case = CASES[name](shape_of("1.5b", 1, 1)._replace(d=4), make())
    assert (len(case.run()[0]), len(case.inputs) - PARAMETERS[name]) == (reads, ahead.num_fixed)


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
