"""What mechanisms send in a pipeline, against the formulas of Attention Residuals (arXiv 2603.15031, section 4.1)."""

import functools
import json
import re
import sys
from typing import Any

import pytest

import depthlm
from depthlm.__main__ import main
from depthlm.accounting.pipeline import Schedule, Sent, read_schedule, transitions
from depthlm.config import mechanisms
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.model import Decoder

from ..options import configuration

# size micro with grouped queries, 32 layers
SHAPE = ["size=micro", "size.num_layers=32", "size.num_heads=4", "size.num_kv_heads=2", "size.head_size=8"]
D, KV = 64, 2 * 2 * 8


@functools.cache
def built(*overrides: str) -> Decoder:
    # a small decoder computes faster than PyTorch finds the shapes of the same operators on meta
    return depthlm.build_model(configuration(*SHAPE, *overrides))


def sent(*overrides: str, stages: int = 4, virtual: int = 2) -> Sent:
    return transitions(built(*overrides), Schedule(stages, virtual))


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


def test_a_state_of_a_constant_size_is_sent_at_every_transition():
    assert values("model=vanilla") == ([D] * 7, [D] * 7)
    assert values("model=mhc") == ([4 * D] * 7, [4 * D] * 7)


def test_denseformer_and_dca_send_all_outputs():
    # chunks of 4 layers: the embedding and the outputs, and for denseformer the average after the last one
    naive, cached = values("model=dca")
    assert [x / D for x in naive] == [1 + 4 * chunk for chunk in range(1, 8)]
    # the embedding and 12 outputs were sent in the first three transitions; later ones send the 16 outputs of 4 chunks
    assert [x / D for x in cached] == [5, 9, 13, 16, 16, 16, 16]
    naive, cached = values("model=denseformer")
    assert [x / D for x in naive] == [2 + 4 * chunk for chunk in range(1, 8)]
    assert [x / D for x in cached] == [6, 10, 14, 17, 17, 17, 17]


def test_depth_attention_sends_keys_and_values_of_its_anchors():
    # layers 0 and 16 of 32 are anchors; layer 16 begins chunk 4, so stage 1 is the first to receive it
    naive, cached = values("model=depth_attention")
    assert [(x - D) / KV for x in naive] == [1, 1, 1, 1, 2, 2, 2]
    assert [(x - D) / KV for x in cached] == [1, 1, 1, 1, 1, 1, 1]


def test_sources_that_no_later_layer_reads_are_not_sent():
    settings = "model.attention.sources=relative", "model.attention.stride=8"
    naive, _ = values("model=depth_attention", *settings)
    # layer l reads l - 8, l - 16, ...; layers 28 to 31 read those with the remainders 4 to 7
    assert [(x - D) / KV for x in naive] == [4, 8, 12, 16, 20, 24, 12]
    naive, _ = values("model=depth_attention", "model.attention.sources=relative", "model.attention.stride=16")
    # layer l >= 16 is the only reader of l - 16
    assert [(x - D) / KV for x in naive] == [4, 8, 12, 16, 12, 8, 4]


def test_moda_sends_its_entries():
    # two entries per layer
    naive, cached = values("model=moda")
    assert [(x - D) / KV for x in naive] == [8 * chunk for chunk in range(1, 8)]
    assert [(x - D) / KV for x in cached] == [8, 16, 24, 32, 32, 32, 32]
    naive, _ = values("model=moda", "model.attention.slots=3")
    assert [(x - D) / KV for x in naive] == [3] * 7


def test_layers_without_keys_and_values_pass_the_depth_list_on():
    overrides = ["size=kimi_micro", "size.num_layers=8", "backbone=kimi_linear"]
    model = depthlm.build_model(configuration("model=value_residual", *overrides), "meta")
    plain = depthlm.build_model(configuration("model=vanilla", *overrides), "meta")
    # layers 3 and 7 have attention; layer 3 has the values that layer 7 mixes
    extra = [a - b for a, b in zip(*(transitions(x, Schedule(4, 2)).naive for x in (model, plain)), strict=True)]
    width = 2 * model.size.num_heads * model.size.head_size
    assert extra == [0, 0, 0, width, width, width, width]


def test_invalid_schedules_are_refused():
    assert read_schedule(["V=4", "P=8"]) == Schedule(8, 4)
    for words in (["P=8", "P=4"], ["8", "4"], ["P=1", "V=4"], ["P=2", "V=0"], ["P=2", "V=x"]):
        with pytest.raises(UserError, match="must be P=<stages>"):
            read_schedule(words)
    with pytest.raises(UserError, match="allowed: P times V up to 32"):
        sent("model=vanilla", stages=8, virtual=5)


@pytest.mark.slow
def test_the_page_has_the_rows_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["depthlm", "summary", "size=3b", "--pipeline", "P=8", "V=4"])
    main()
    lines = (re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    printed = {f"| `{name}` | {' | '.join(cells)} |" for name, *cells in lines}
    page = (REPOSITORY / "docs/pipeline.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    assert printed >= {*rows}


@pytest.mark.slow
def test_the_command_prints_every_mechanism(monkeypatch, capsys):
    command = ["depthlm", "summary", "size=micro", "size.num_layers=8", "--pipeline", "P=4", "V=2"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    text = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    main()
    table: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert sorted(table) == mechanisms()
    for name, bytes_ in table.items():
        assert name in text
        assert len(bytes_["naive"]) == len(bytes_["cached"]) == 7
        assert all(c <= n for n, c in zip(bytes_["naive"], bytes_["cached"], strict=True))
