"""On a GPU, streams of hyper-connections and mHC are computed again in the backward pass, with the same gradients."""

from collections.abc import Callable

import pytest
import torch

from depthlm.mechanisms import hyper_connections, mhc
from depthlm.model import Decoder


@pytest.mark.parametrize("name", ["mhc", "hyper_connections"])
def test_a_decoder_that_rebuilds_has_the_same_gradients(
    build: Callable[..., Decoder], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(f"model={name}", "size.num_layers=6")
    tokens = torch.arange(12).view(2, 6)
    results = []
    for rebuilds in (False, True):
        for module in (hyper_connections, mhc):
            monkeypatch.setattr(module, "rebuilds", lambda *_, rebuilds=rebuilds: rebuilds)
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).nll.backward()
        results.append({key: parameter.grad.clone() for key, parameter in model.named_parameters()})
    plain, rebuilt = results
    for key in plain:
        assert torch.equal(plain[key], rebuilt[key]), key
