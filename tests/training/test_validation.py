"""Diagnostics of mechanisms, and how they reach metrics.jsonl."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

import depthlm
from depthlm.data import Corpus
from depthlm.errors import DataError
from depthlm.inspect.depth_mixing import depth_mixing
from depthlm.model import Observer
from depthlm.model.connection import Connection, State
from depthlm.runs.records import read_metrics
from depthlm.training.engine import Engine
from depthlm.training.validation import diagnose, log_sample

SHAPE = ["size=micro", "data.tokenizer=bytes"]
OF_STREAMS = {"res_from_identity", "res_from_uniform", "gain", "embedding_share"}


def test_a_prompt_that_the_tokenizer_cannot_encode_gives_a_warning_and_no_sample(caplog):
    class Closed:
        def encode_batch(self, texts):
            raise DataError("the end of text is also what unknown text is encoded as", "tokenizer.json", "Set another.")

    log_sample(depthlm.compose(SHAPE), cast("Engine", None), cast("Corpus", SimpleNamespace(tokenizer=Closed())))
    assert "training.sample=def: no sample: the end of text is also" in caplog.text


def test_autocast_does_not_round_the_product_of_mixing_maps():
    model = depthlm.build_model(depthlm.compose([*SHAPE, "model=mhc", "size.num_layers=24"]))
    tokens = torch.arange(8)[None]
    with torch.autocast("cpu", torch.bfloat16):
        found = diagnose(model, tokens)["mhc_gain"]
    assert found == pytest.approx(diagnose(model, tokens)["mhc_gain"], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mhc", ["model=mhc", "model.connection.collapse=gated"]),
        ("hyper_connections", ["model=hyper_connections", "model.connection.collapse=learned"]),
    ],
)
def test_the_diagnostics_of_streams(name, overrides):
    model = depthlm.build_model(depthlm.compose([*SHAPE, *overrides]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.connections.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    # of one token, so that no mean hides a difference
    tokens = torch.randint(256, (1, 1), generator=generator)
    found = {key.removeprefix(f"{name}_"): value for key, value in diagnose(model, tokens).items()}
    maps: list[torch.Tensor] = []

    class Maps(Observer):
        def read(self, connection: Connection, state: State) -> None:
            if connection.spec.kind != "final":
                maps.append(connection.weights(state).res_btij[0, 0].detach())

    model.hidden(tokens, observer=Maps())
    product, distances = torch.eye(4), []
    for res in maps:
        product = res @ product
        distances.append([(res - torch.eye(4)).square().sum().sqrt(), (res - 0.25).square().sum().sqrt()])
    from_identity, from_uniform = map(max, zip(*distances, strict=True))
    last_row = torch.from_numpy(depth_mixing(model, [tokens])[0][-1]).abs()
    expected = {
        "res_from_identity": from_identity,
        "res_from_uniform": from_uniform,
        "gain": product.abs().sum(1).max(),
        "embedding_share": last_row[0] / last_row.sum(),
    }
    assert expected.keys() == OF_STREAMS
    assert {key: found[key] for key in expected} == {
        key: pytest.approx(float(value), rel=1e-4) for key, value in expected.items()
    }


def test_every_validation_logs_diagnostics(train_run):
    run = train_run("model=mhc", "training.max_steps=2", "training.validate_every=1")
    rows = list(read_metrics(run / "metrics.jsonl"))
    assert len(rows) == 2
    assert all(row["mechanism/mhc_row_deviation"] < 1e-6 for row in rows)
    assert all(row["mechanism/mhc_column_deviation"] < 1e-2 for row in rows)
