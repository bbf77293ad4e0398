"""`inspect ablate=`: its files, its arrays and its error messages."""

from typing import Any

import numpy as np
import pytest

from depthlm.errors import UserError
from depthlm.inspect.interventions import Batch, Intervention, ablate, correlation, losses, record
from depthlm.model import Decoder

from .conftest import TOKENS
from .test_command import inspect, refused

BATCHES: list[Batch] = [(TOKENS[:2, :-1], TOKENS[:2, 1:]), (TOKENS[2:, :-1], TOKENS[2:, 1:])]


def changes(model: Decoder) -> dict[str, Any]:
    """The arrays of an ablation, also drawn."""
    pictures, _ = ablate(model, BATCHES)
    for picture in pictures:
        picture.draw()
    return {name: array for picture in pictures for name, array in picture.arrays.items()}


def test_a_mechanism_without_edges_is_refused(build):
    model = build("model=shared_kv")
    with pytest.raises(UserError, match=r"^ablate=edges: .* has no weights of sources .*: attention_residuals, "):
        ablate(model, BATCHES)


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


@pytest.mark.usefixtures("rendered")
def test_command_ablates(trained, tmp_path, monkeypatch, capsys):
    inspect(monkeypatch, f"run={trained}", "ablate=edges", "tokens=96", f"to={tmp_path}/a", "renormalize=false")
    output = capsys.readouterr().out
    assert "96 tokens of the validation set local" in output
    assert "moda: rank correlation of |weight| and the change of the loss without the edge: " in output
    names = {"attention_residuals_ablation_edges.png", "moda_ablation_edges.png", "ablation_edges.npz"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    assert (tmp_path / "a" / "moda_ablation_edges.png").stat().st_size > 10_000


def test_bad_combinations_are_refused(trained, monkeypatch, capsys):
    for words, message in {
        "ablate=edge": "ablate=edge: must be",
        f"compare={trained} ablate=edges": "compare=: does not go with ablate=",
        "renormalize=false": "renormalize=false: has an effect only with ablate=",
        "ablate=edges text=a": "one token, which leaves nothing to predict",
    }.items():
        assert message in refused(monkeypatch, capsys, f"run={trained}", *words.split())
