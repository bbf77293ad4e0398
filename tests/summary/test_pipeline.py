"""What mechanisms send in a pipeline, against the formulas of Attention Residuals (arXiv 2603.15031, section 4.1)."""

import functools
import json
import re
import sys

import pytest

import depthlm
from depthlm.__main__ import main
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.model import Decoder
from depthlm.summary.overhead import Sent, read_schedule, transitions

from ..options import configuration

# size micro with grouped queries, 32 layers
SHAPE = ["size=micro", "size.num_layers=32", "size.num_heads=4", "size.num_kv_heads=2", "size.head_size=8"]
D, KV = 64, 2 * 2 * 8


@functools.cache
def built(*overrides: str) -> Decoder:
    # a small decoder computes faster than PyTorch finds the shapes of the same operators on meta
    return depthlm.build_model(configuration(*SHAPE, *overrides))


def sent(*overrides: str, stages: int = 4, virtual: int = 2) -> Sent:
    return transitions(built(*overrides), stages, virtual)


def values(*overrides: str, **schedule: int) -> tuple[list[float], list[float]]:
    """Return the values, of two bytes each, across each transition: naively, and with caching."""
    naive, cached = sent(*overrides, **schedule)
    return [x / 2 for x in naive], [x / 2 for x in cached]


@pytest.mark.parametrize(("stages", "virtual", "blocks"), [(2, 1, 1), (4, 2, 2), (2, 4, 1), (8, 4, 2)])
def test_formulas_of_attention_residuals(stages, virtual, blocks):
    chunks = stages * virtual
    # blocks end where chunks end
    size = 64 // chunks // blocks
    overrides = "model=attention_residuals", f"model.connection.block_size={size}"
    naive, cached = values(*overrides, stages=stages, virtual=virtual)
    # the embedding, which the paper does not count, is sent at each transition, and with caching once to each stage
    embedding = [D] * (chunks - 1), [D] * (stages - 1) + [0] * (chunks - stages)
    blocks_sent = [a - b for a, b in zip(naive, embedding[0], strict=True)]
    new_blocks = [a - b for a, b in zip(cached, embedding[1], strict=True)]
    assert sum(blocks_sent) == blocks * D * chunks * (chunks - 1) / 2
    assert max(blocks_sent) == blocks * D * (chunks - 1)
    assert sum(new_blocks) == blocks * D * (stages * (stages - 1) / 2 + (virtual - 1) * stages**2)
    assert max(new_blocks) == blocks * D * (stages if virtual > 1 else stages - 1)


def test_a_running_sum_is_sent_again():
    # blocks of two chunks of 8 sublayers: every second transition is within a block
    naive, cached = values("model=attention_residuals", "model.connection.block_size=16")
    assert [x / D for x in naive] == [2, 2, 3, 3, 4, 4, 5]
    # to stages 1, 2, 3, then to 0, 1, 2, 3, which all have the embedding, and the last two also block 1
    assert [x / D for x in cached] == [2, 2, 3, 2, 3, 2, 3]


# in chunks of 4 of 32 layers: what crosses each of the seven transitions, beyond the stream for attentions
@pytest.mark.parametrize(
    ("overrides", "beyond", "unit", "naive", "cached"),
    [
        ("model=mhc", 0, 4 * D, [1] * 7, [1] * 7),
        # the embedding and the outputs; the first three transitions have sent 12, later ones send those of 4 chunks
        ("model=dca", 0, D, [1 + 4 * chunk for chunk in range(1, 8)], [5, 9, 13, 16, 16, 16, 16]),
        # also the average after the last one
        ("model=denseformer", 0, D, [2 + 4 * chunk for chunk in range(1, 8)], [6, 10, 14, 17, 17, 17, 17]),
        # layers 0 and 16 are anchors; layer 16 begins chunk 4, so stage 1 is the first to receive it
        ("model=depth_attention", D, KV, [1, 1, 1, 1, 2, 2, 2], [1] * 7),
        # layer l >= 16 is the only reader of l - 16, and what no later layer reads is not sent
        ("model=depth_attention model.attention.sources=relative model.attention.stride=16", D, KV,
         [4, 8, 12, 16, 12, 8, 4], None),
        # two entries per layer
        ("model=moda", D, KV, [8 * chunk for chunk in range(1, 8)], [8, 16, 24, 32, 32, 32, 32]),
    ],
)  # fmt: skip
def test_what_a_mechanism_sends(overrides, beyond, unit, naive, cached):
    found = [[(x - beyond) / unit for x in sent_values] for sent_values in values(*overrides.split())]
    assert found[0] == naive
    assert cached is None or found[1] == cached


def test_layers_without_keys_and_values_pass_the_depth_list_on():
    overrides = ["size=kimi_micro", "size.num_layers=8", "backbone=kimi_linear"]
    model = depthlm.build_model(configuration("model=value_residual", *overrides), "meta")
    plain = depthlm.build_model(configuration("model=vanilla", *overrides), "meta")
    # layers 3 and 7 have attention; layer 3 has the values that layer 7 mixes
    extra = [a - b for a, b in zip(*(transitions(x, 4, 2).naive for x in (model, plain)), strict=True)]
    width = 2 * model.size.num_heads * model.size.head_size
    assert extra == [0, 0, 0, width, width, width, width]


def test_invalid_schedules_are_refused():
    assert read_schedule(["V=4", "P=8"]) == (8, 4)
    for words in (["P=8", "P=4"], ["8", "4"], ["P=1", "V=4"], ["P=2", "V=0"], ["P=2", "V=x"]):
        with pytest.raises(UserError, match="must be P=<stages>"):
            read_schedule(words)
    with pytest.raises(UserError, match="allowed: P times V up to 32"):
        sent("model=vanilla", stages=8, virtual=5)


@pytest.mark.slow
def test_the_command_prints_the_rows_of_the_page(monkeypatch, capsys):
    chosen = ["vanilla", "attention_residuals"]
    monkeypatch.setattr("depthlm.summary.overhead.mechanisms", lambda config_dir: chosen)
    monkeypatch.setattr(sys, "argv", ["depthlm", "summary", "size=3b", "--pipeline", "P=8", "V=4"])
    main()
    lines = (re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    printed = {f"| `{name}` | {' | '.join(cells)} |" for name, *cells in lines}
    page = (REPOSITORY / "docs/pipeline.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {line.split("`")[1] for line in rows} >= {*chosen}
    assert printed >= {line for line in rows if line.split("`")[1] in chosen}
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    main()
    assert [*json.loads(capsys.readouterr().out)] == chosen
