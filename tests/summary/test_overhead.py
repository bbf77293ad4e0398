"""The overhead of the mechanisms, against the papers' numbers."""

import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

import depthlm
from depthlm.__main__ import main
from depthlm.accounting.cost import count_parameters, flops_per_token
from depthlm.config import mechanisms
from depthlm.locations import REPOSITORY
from depthlm.model import Decoder
from depthlm.summary.overhead import PREFILL_CHUNK, Overhead, overhead

from ..options import configuration

KIB, MIB, GIB = 2**10, 2**20, 2**30
LENGTH = 2048
SMALL = {"size.hidden_size=64", "size.hidden_size=256"}


@pytest.fixture(scope="module")
def meta() -> Callable[..., Decoder]:
    """Build the decoder of overrides, without weights; the tests do not change it.

    A small one has weights, since it computes faster than PyTorch finds the shapes of the same operators on meta.
    """
    return functools.cache(
        lambda *overrides: depthlm.build_model(configuration(*overrides), "cpu" if SMALL & {*overrides} else "meta")
    )


@pytest.fixture(scope="module")
def cost(meta: Any) -> Callable[..., Overhead]:
    """Return the overhead of the decoder of overrides."""
    return functools.cache(lambda *overrides: overhead(meta(*overrides), LENGTH))


# Depth-Attention (arXiv 2606.05014), Table 2: FLOPs, activation I/O in bytes, memory of a 128K prefill in GiB
TABLE_2 = {
    "depth_attention": (2.40e5, 282 * KIB, 0.0),
    "denseformer": (5.01e6, 4.97 * MIB, 24.0),
    "attention_residuals": (4.26e6, 4.44 * MIB, 4.0),
    "mhc": (4.72e7, 8.63 * MIB, 1.5),
}


@pytest.mark.parametrize("preset", TABLE_2)
def test_table_2_of_depth_attention(cost, preset):
    costs = cost(f"model={preset}", "size=3b")
    flops, io_bytes, prefill = TABLE_2[preset]
    assert costs.flops_per_token == pytest.approx(flops, rel=2e-3)
    assert costs.io_bytes_per_token == pytest.approx(io_bytes, rel=2e-3)
    assert costs.prefill_bytes / GIB == prefill
    # in chunks, what is retained of one of them
    assert costs.prefill_chunk_bytes * 128 * 1024 == costs.prefill_bytes * PREFILL_CHUNK


def test_memory_of_a_prefill_in_chunks_of_attention_residuals(meta):
    """Section 4.2 of Attention Residuals: N T d elements, which are 15 GB at 128K tokens and 8 blocks.

    The paper's 1.9 GB are an eighth of it on each of eight devices. A chunk of 16K tokens is an eighth as well.
    """
    # D is not in the paper: 8 blocks of 128K tokens in 16 bits are 15 GB at 7168
    model = meta("model=attention_residuals", "size=micro", "size.num_layers=8", "size.hidden_size=7168")
    costs = overhead(model, LENGTH)
    assert costs.prefill_bytes == 8 * 128 * 1024 * 7168 * 2
    assert costs.prefill_bytes / 1e9 == pytest.approx(15, abs=0.05)
    assert 16 * 1024 / PREFILL_CHUNK * costs.prefill_chunk_bytes / 1e9 == pytest.approx(1.9, abs=0.05)


# Attention Residuals (arXiv 2603.15031), Table 1, in hidden states of d values: its L = 128 layers are our sublayers,
# in N = 8 blocks of S = 16, and mHC has m = 4 streams. The maps of mHC are no hidden states.
L, N, S, M = 128, 8, 16, 4
TABLE_1 = {
    "vanilla": (3, lambda d: 2 + 1),
    "mhc": (34, lambda d: 8 * M + 2 + (2 * M * M + 4 * M) / d),
    "attention_residuals_full": (24, lambda d: S + N),
    "attention_residuals": (5.5, lambda d: N / S + 5),
}


@pytest.mark.parametrize("preset", TABLE_1)
def test_table_1_of_attention_residuals(cost, preset):
    printed, formula = TABLE_1[preset]
    # only the maps depend on the width
    for width in (64, 256) if preset == "mhc" else (64,):
        costs = cost(f"model={preset}", "size=micro", f"size.num_layers={L // 2}", f"size.hidden_size={width}")
        assert costs.two_phase_io == pytest.approx(formula(width), rel=1e-12)
        # the printed number leaves out the maps, which have 48 values
        assert abs(costs.two_phase_io - printed) <= 48 / width + 1e-9


def test_a_second_attention_over_the_sequence_is_in_the_added_flops(meta, cost):
    shape = "size=micro", "size.num_layers=48", "size.hidden_size=64"
    forward = [
        flops_per_token(meta(*model, *shape), LENGTH).forward
        for model in (["model=moda", "model.attention.start=identity"], ["model=vanilla"])
    ]
    assert cost("model=moda", "model.attention.start=identity", *shape).flops_per_token == forward[0] - forward[1]


def test_two_phases_of_other_mechanisms_are_their_reads_alone(cost):
    shape = "size=micro", "size.num_layers=48", "size.hidden_size=64"
    for preset in ("denseformer", "dca", "depth_attention", "moda"):
        costs = cost(f"model={preset}", *shape)
        assert costs.two_phase_io == pytest.approx(3 + costs.io_bytes_per_token / 2 / (96 * 64), rel=1e-6)
    # queries that depend on the token are not known before
    dynamic = cost("model=attention_residuals", "model.connection.query=input_dependent", *shape)
    assert dynamic.two_phase_io == pytest.approx(3 + (2 * 520 + 96) / 96)
    # without H_res, its two passes over the streams are missing
    assert cost("model=mhc_hunyuan_v4", *shape).two_phase_io == pytest.approx(6 * M + 2 + 4 * M / 64)


# sources summed over the sublayers of 48 layers, without the final read
@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("depth_attention", [], 117),
        ("depth_attention", ["model.attention.sources=relative"], 48),
        ("attention_residuals", [], 520),
        ("attention_residuals_recency", [], 528),
        # 108 in the code of its authors; the counter of sublayers restarts at each snapshot
        ("attention_residuals_recency", ["size.num_layers=12", "model.connection.block_size=3"], 108),
    ],
)
def test_sources(meta, preset, overrides, expected):
    model = meta(f"model={preset}", "size=3b", *overrides)
    if preset == "depth_attention":
        assert sum(layer.attention.num_mixed() for layer in model.layers) == expected
    else:
        assert sum(c.num_sources for c in list(model.connections)[:-1]) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model=denseformer", "size=3b"], 1224),
        (["model=attention_residuals", "size=3b"], 97 * 2 * 2048),
        (["model=attention_residuals_recency", "size=3b"], 97 * (2 * 2048 + 1)),
        (["model=mhc", "size=3b"], 96 * (24 * (4 * 2048 + 1) + 3 + 4 * 2048)),
        (["model=depth_attention", "size=3b"], 0),
        (["model=grn_v1", "size=lm1b", "backbone=lm1b"], 28),
        (["model=grn_v2", "size=lm1b", "backbone=lm1b"], 28 * 512),
        (["model=grn_v3", "size=lm1b", "backbone=lm1b"], 28_672),
        # DeepCrossAttention also has two more norms per layer, which the paper does not count
        (["model=dca", "size=lm1b", "backbone=lm1b"], 71_680 + 2 * 6 * 2 * 512),
        (["model=grn_v3", "model.connection.w=shared", "size=lm1b", "backbone=lm1b"], 28 * 512 + 7 * 512),
        # one key/value head for 4 query heads
        (["model/connection=depth_qkv", "size=lm1b", "size.num_kv_heads=2"], 13 * 512**2 * 3 // 2),
        (["model/connection=mrla", "size=lm1b"], 12 * 512 * (2 * 64 + 1)),
    ],
)
def test_extra_parameters(cost, overrides, expected):
    assert cost(*overrides).parameters == expected


# the tables of MoDA (arXiv 2603.15619) and DeepCrossAttention (arXiv 2502.06785), in parameters
@pytest.mark.parametrize(
    ("overrides", "expected", "rounding"),
    [
        (["size=moda_700m", "backbone=olmo2", "model.attention.ffn_kv=false"], 669.046e6, 500),
        (["size=moda_700m", "backbone=olmo2"], 705.746e6, 500),
        (["size=moda_700m", "backbone=olmo2", "model.attention.attn_kv=true"], 742.446e6, 500),
        (["size=moda_layers_48", "backbone=moda_layers", "model.attention.last_layer_kv=true"], 128.11e6, 5000),
        (["size=moda_layers_24", "backbone=moda_layers", "model.attention.last_layer_kv=true"], 73.72e6, 8000),
        (["model=laurel", "size=lm1b", "backbone=lm1b"], 49.75e6, 5000),
        (["model=denseformer", "size=lm1b", "backbone=lm1b"], 49.65e6, 5000),
        (["model=grn_v1", "size=lm1b", "backbone=lm1b"], 49.65e6, 5000),
        (["model=grn_v2", "size=lm1b", "backbone=lm1b"], 49.66e6, 5000),
        (["model=grn_v3", "size=lm1b", "backbone=lm1b"], 49.68e6, 5000),
        (["model=dca", "size=lm1b", "backbone=lm1b"], 49.73e6, 5000),
    ],
)
def test_parameter_counts_equal_those_of_the_papers(meta, overrides, expected, rounding):
    total = count_parameters(meta(*(["model=moda"] if "moda" in overrides[0] else []), *overrides))["total"]
    assert abs(total - expected) <= rounding


def test_forward_flops_of_modas_depth_keys_and_values(meta):
    """Table 1 of MoDA: 8.01 T and 8.02 T for one sequence of 4096 tokens; 630 = 0 + 1 + ... + 35 pairs of layers."""
    settings = ["size=moda_700m", "backbone=olmo2"]
    vanilla = flops_per_token(meta(*settings), 4096).forward
    moda = flops_per_token(meta("model=moda", "model.attention.ffn_kv=false", *settings), 4096).forward
    assert (moda - vanilla) * 4096 == pytest.approx(4 * 1024 * 4096 * 630)


def table_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, list[str]]:
    """Return the cells of each mechanism that `summary --overhead` prints, for some of the mechanisms."""
    monkeypatch.setattr("depthlm.summary.overhead.mechanisms", lambda config_dir: PRINTED)
    monkeypatch.setattr(sys, "argv", ["depthlm", "summary", "--overhead", "size=3b", *options])
    main()
    lines = capsys.readouterr().out.splitlines()
    return {name: cells for name, *cells in (re.split(" {2,}", line.strip()) for line in lines)}


PRINTED = ["vanilla", "attention_residuals", "mhc"]


@pytest.mark.slow
def test_the_page_on_costs_has_the_rows_of_the_overhead_table(monkeypatch, capsys):
    page = (REPOSITORY / "docs/costs.md").read_text()
    rows = table_of(monkeypatch, capsys)
    assert "4.26e+06" in rows["attention_residuals"]
    for name in PRINTED[1:]:
        assert f"| `{name}` | {' | '.join(rows[name])} |" in page
    assert not [name for name in mechanisms() if name != "vanilla" and f"| `{name}` | " not in page]
    rows = table_of(monkeypatch, capsys, "size.num_layers=64", "--io", "two_phase")
    assert rows["mechanism"][2:5] == ["I/O/sublayer", "128K prefill", "in chunks of 2,048"]
    assert [rows[name][2] for name in PRINTED[:2]] == ["3.0 D", "5.5 D"]
    assert all(f"| `{name}` | {rows[name][2]} |" in page for name in PRINTED)
    monkeypatch.setattr(sys, "argv", [*sys.argv[:3], "size=micro", "--json"])
    main()
    table = json.loads(capsys.readouterr().out)
    assert table["mhc"]["parameters"] > 0
