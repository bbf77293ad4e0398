"""`inspect ablate=` and `prune=`: their files, their resumption, the pruned run and their error messages."""

import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import depthlm
from depthlm.config.saved import is_own
from depthlm.config.validate.decoder import factories
from depthlm.errors import UserError
from depthlm.files import read_record, write_record
from depthlm.hugging_face.causal_lm import CausalLM
from depthlm.hugging_face.folder import as_causal_lm
from depthlm.inspect import ablation, pruning
from depthlm.inspect.ablation import Finished, ablate, correlation, measure, sets_of
from depthlm.inspect.interventions import Batch, Edge, Intervention, losses, record
from depthlm.inspect.pruning import prune
from depthlm.model import Decoder
from depthlm.runs.checkpoints import newest_checkpoint
from depthlm.training.checkpoint.restoring import needs_repartition

from .conftest import TOKENS, composed
from .test_command import inspect, refused

BATCHES: list[Batch] = [(TOKENS[:2, :-1], TOKENS[:2, 1:]), (TOKENS[2:, :-1], TOKENS[2:, 1:])]


def changes(model: Decoder, mode: Any = "edges", **settings: Any) -> dict[str, Any]:
    """The arrays of an ablation, also drawn."""
    pictures, _ = ablate(model, BATCHES, mode, **settings)
    for picture in pictures:
        picture.draw()
    return {name: array for picture in pictures for name, array in picture.arrays.items()}


def test_a_mechanism_without_edges_is_refused(build):
    model = build("model=shared_kv")
    with pytest.raises(UserError, match=r"^ablate=edges: .* has no weights of sources .*: attention_residuals, "):
        ablate(model, BATCHES, "edges")
    with pytest.raises(UserError, match=r"^prune=2: .* has no sources over depth"):
        prune(model, BATCHES, 2)


def test_arrays_of_edges_are_in_the_place_of_their_weights(build):
    model = build("model=attention_residuals", "model.connection.block_size=1", "model/attention=moda")
    arrays = changes(model)
    weight, change = (arrays[f"attention_residuals_ablation_edges_{name}"] for name in ("weight", "change"))
    np.testing.assert_allclose(np.nansum(weight, 1), 1, rtol=1e-5)
    assert weight.shape == change.shape == (9, 9)
    np.testing.assert_array_equal(np.isfinite(change), np.tri(9, dtype=bool))
    # the first read has a single source, whose weight is fixed
    free = np.tri(9, dtype=bool) & (np.arange(9) > 0)[:, None]
    rank = arrays["attention_residuals_ablation_edges_change_rank_correlation"]
    assert rank == pytest.approx(correlation(np.abs(weight[free]), change[free]))
    reads, baseline = record(model, BATCHES)
    edge = next(e for e in reads.all_edges() if e.reader.name == "mlp_2" and reads.source(e) == 3)
    total = sum(losses(model, batch, Intervention(reads, [[edge]], "zero"))[0] for batch in BATCHES)
    assert change[5, 3] == pytest.approx((total - baseline.sum()) / 33, abs=1e-6)
    # entry 2l of attention l, 2l + 1 of its MLP
    moda = arrays["moda_ablation_edges_change"]
    np.testing.assert_array_equal(np.isfinite(moda).sum(1), [2, 4, 6])
    assert arrays["moda_ablation_edges_rows"].tolist() == ["layer 1", "layer 2", "layer 3"]


def test_a_source_is_removed_from_all_readers(build):
    model = build("model=denseformer")
    arrays = changes(model, "sources")
    assert arrays["denseformer_ablation_sources_sources"].tolist() == [0, 1, 2, 3, 4]
    _, baseline = record(model, BATCHES)
    for connection in model.connections:
        if hasattr(connection, "a") and len(connection.a) > 2:
            connection.a[2] = 0
    total = record(model, BATCHES)[1].sum()
    found = arrays["denseformer_ablation_sources_change"][2]
    assert found == pytest.approx((total - baseline.sum()) / 33, abs=1e-6)
    assert abs(found) > 1e-4
    with pytest.raises(UserError, match=r"^ablate=tokens: the weights of this model do not depend on tokens"):
        changes(model, "tokens")
    arrays = changes(build("model=mhc", "model/attention=depth_attention"), "tokens")
    assert arrays["mhc_ablation_tokens_permuted"].shape == (8, 1)
    assert arrays["depth_attention_ablation_tokens_mean"].shape == (3, 4)


def test_an_interrupted_ablation_continues(build, tmp_path, monkeypatch):
    model, file = build("model=attention_residuals"), tmp_path / "unfinished.json"
    monkeypatch.setattr("depthlm.inspect.interventions.PASS", 100)
    reads, _ = record(model, BATCHES)
    sets = [*sets_of(reads, "edges").values()]

    def run(key: str, stop: int | None = None) -> tuple[Any, int]:
        calls = []

        def counted(*arguments: Any) -> Any:
            if len(calls) == stop:
                raise KeyboardInterrupt
            calls.append(arguments)
            return losses(*arguments)

        monkeypatch.setattr(ablation, "losses", counted)
        finished = Finished(file, {"tokens": key}, (1, 2, len(sets)))
        return measure(model, BATCHES, reads, sets, ["zero"], finished), len(calls)

    with pytest.raises(KeyboardInterrupt):
        run("a", stop=5)
    continued, calls = run("a")
    again, all_calls = run("b")
    assert calls == all_calls - 5
    np.testing.assert_array_equal(continued, again)
    # a result that was changed on the disk is measured again
    saved = json.loads(file.read_text())
    saved["record"]["sums"][0][0][0] += 1.0
    for damaged in (json.dumps(saved), '{"record": 1}'):
        file.write_text(damaged)
        assert run("b")[1] == all_calls


def test_pruning_keeps_the_greedily_chosen_sources(build, tmp_path, monkeypatch):
    overrides = "model=attention_residuals", "model.connection.block_size=1", "size.num_layers=2"
    model, file, key = build(*overrides), tmp_path / "unfinished.json", {"tokens": "a"}
    connection, attention = factories(composed(*overrides).model)

    @torch.no_grad()
    def loss(sources: dict[str, list[list[int]]]) -> float:
        pruned = Decoder(model.size, model.backbone, connection, attention, kept_sources=sources)
        pruned.load_state_dict(model.state_dict())
        return sum(float(pruned(*batch).nll) for batch in BATCHES)

    kept: dict[str, list[list[int]]] = {}
    for count, name in enumerate(["mlp_0", "attention_1", "mlp_1", "final"], 2):
        sources = list(range(count))
        while len(sources) > 2:
            tried = {source: loss(kept | {name: [[s for s in sources if s != source]]}) for source in sources}
            sources.remove(min(tried, key=lambda source: tried[source]))
            kept[name] = [sources]
    found = prune(model, BATCHES, 2, file, key)
    assert found.kept == kept
    assert found.after * 33 == pytest.approx(loss(kept), rel=1e-5)
    assert found.before * 33 == pytest.approx(loss({}), rel=1e-5)
    # a finished read is not measured again
    content, reads = read_record(file), list[str]()
    assert content is not None
    write_record(file, content | {"done": content["done"][:-1]})

    def chosen(model: Decoder, batches: list[Batch], before: Any, part: list[Edge], *others: Any) -> list[Edge]:
        reads.append(part[0].reader.name)
        return part[2:]

    monkeypatch.setattr(pruning, "least_useful", chosen)
    assert prune(model, BATCHES, 2, file, key).kept == kept | {"final": [[0, 1]]}
    assert reads == ["final"]


def test_a_pruned_model_generates_and_exports(build):
    overrides = "model=attention_residuals", "model/attention=moda"
    complete = build(*overrides)
    kept = {"mlp_2": [[0]], "layer_3": [[0, 2]]}
    config = composed(*overrides)
    config = replace(config, model=replace(config.model, kept_sources=kept))
    model = depthlm.build_model(config).eval().requires_grad_(False)
    model.load_state_dict(complete.state_dict())
    logits = model(TOKENS)
    assert (logits - complete(TOKENS)).abs().max() > 1e-3
    cache = model.make_cache()
    parts = [model(part, cache=cache) for part in TOKENS.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits, atol=1e-4, rtol=1e-4)
    exported = as_causal_lm(model, config)
    again = type(
        "Loaded", (CausalLM,),
        {"connection_class": type(model.connections[0]), "attention_class": type(model.layers[0].attention)},
    )(type(exported.config).from_dict(json.loads(json.dumps(exported.config.to_dict()))))  # fmt: skip
    again.decoder.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(TOKENS).logits, logits)


@pytest.mark.usefixtures("rendered")
def test_command_ablates_and_prunes(trained, tmp_path, monkeypatch, capsys):
    inspect(monkeypatch, f"run={trained}", "ablate=edges", "tokens=96", f"to={tmp_path}/a", "renormalize=false")
    output = capsys.readouterr().out
    assert "96 tokens of the validation set local" in output
    assert "moda: without the edge, the loss changes most for layer 1 from source" in output
    names = {"attention_residuals_ablation_edges.png", "moda_ablation_edges.png", "ablation_edges.npz"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    assert (tmp_path / "a" / "moda_ablation_edges.png").stat().st_size > 10_000
    pruned = tmp_path / "pruned"
    with monkeypatch.context() as patch:
        # killed while the results are written, which the next call writes again
        patch.setattr("depthlm.inspect.command.write", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            inspect(patch, f"run={trained}", "prune=1", "tokens=96", f"to={pruned}")
    assert not pruned.exists()
    inspect(monkeypatch, f"run={trained}", "prune=1", "tokens=96", f"to={pruned}")
    assert "nats per token without 11 of 17 edges" in capsys.readouterr().out
    model, config = depthlm.load(pruned)
    assert {name: len(panels[0]) for name, panels in config.model.kept_sources.items()} == dict.fromkeys(
        ["mlp_0", "layer_1", "attention_1", "mlp_1", "final"], 1
    )
    assert model.kept_sources == config.model.kept_sources
    assert is_own(pruned)
    assert "pruned already" in refused(monkeypatch, capsys, f"run={pruned}", "prune=1", "text=some text")
    assert "exists already" in refused(monkeypatch, capsys, f"run={trained}", "prune=1", f"to={pruned}")
    assert not trained.with_name(f"{trained.name}-pruned1").exists()
    checkpoint = newest_checkpoint(pruned)
    assert checkpoint is not None
    with pytest.raises(UserError, match=r"no state of the optimizer, since `inspect prune=` wrote it; .*init_from="):
        needs_repartition(*checkpoint, config, plan=None)  # type: ignore[arg-type]


def test_bad_combinations_are_refused(trained, monkeypatch, capsys):
    for words, message in {
        "ablate=edge": "ablate=edge: must be",
        "prune=0": "prune=0: must be",
        "prune=1 ablate=edges": "prune=1: does not go with ablate=",
        f"compare={trained} ablate=edges": "compare=: does not go with ablate=",
        "renormalize=false": "renormalize=false: has an effect only with ablate=",
        "ablate=edges text=a": "one token, which leaves nothing to predict",
    }.items():
        assert message in refused(monkeypatch, capsys, f"run={trained}", *words.split())
    for model, message in {
        "attention_residuals": r"mlp_9: no such read; allowed: final, and attention_",
        "vanilla": "model=vanilla has no sources",
    }.items():
        with pytest.raises(UserError, match=rf"model.kept_sources.*{message}"):
            depthlm.compose([f"model={model}", "size=micro", "+model.kept_sources.mlp_9=[[0]]"])
