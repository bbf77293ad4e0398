"""The attention maps of MoDA equal its attention probabilities."""

from typing import Any

import numpy as np
import pytest
import torch

from depthlm.model import Observer
from depthlm.ops.moda.naive import probabilities

from .conftest import TOKENS


class Attended(Observer):
    """Records the arguments and the result of each attention."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def attend(self, spec: Any, attention: Any, projected: Any, depth: Any, context: Any) -> None:
        attended = attention.attend(projected, depth, context)[0]
        self.seen[spec.layer] = projected, list(depth), context, attended


def literal(q: Any, k: Any, depth: Any, seen_ts: Any) -> np.ndarray[Any, Any]:
    """Compute p[b, h, t, x] in float64, one query at a time."""
    q, k = q.double().numpy(), k.double().numpy()
    entries = [entry[0].double().numpy() for entry in depth]
    batch, heads, t, width = q.shape
    found = np.zeros((batch, heads, t, t + len(entries)))
    for b, h, i in np.ndindex(batch, heads, t):
        of = h // (heads // k.shape[1])
        tokens = [j for j in range(t) if seen_ts[b, i, j]]
        scores = [q[b, h, i] @ k[b, of, j] for j in tokens] + [q[b, h, i] @ entry[b, of, i] for entry in entries]
        weights = np.exp(np.array(scores) / width**0.5)
        found[b, h, i, [*tokens, *range(t, t + len(entries))]] = weights / weights.sum()
    return found


SLOTS = ["model.attention.attn_kv=true", "model.attention.slots=3", "model.loops=2"]


@pytest.mark.parametrize(("settings", "end_of_text"), [([], None), (SLOTS, 9)])
def test_maps_equal_a_literal_softmax(build, arrays, settings, end_of_text):
    model = build("model=moda", *settings)
    model.end_of_text = end_of_text
    tokens = TOKENS.clone()
    tokens[0, 4] = 9
    attended = Attended()
    with torch.no_grad():
        model(tokens, observer=attended)
    found = arrays(model, tokens)
    layers = len(attended.seen)
    share, total = np.full((layers, 2, layers), np.nan), np.zeros(layers)
    for layer, (projected, depth, context, result) in attended.seen.items():
        mask = (
            context.mask_b1ts[:, 0] if context.mask_b1ts is not None else torch.ones(3, 12, 12, dtype=torch.bool).tril()
        )
        p = literal(projected[0], projected[1], depth, mask)
        if f"moda_maps_{layer}" in found:
            np.testing.assert_allclose(found[f"moda_maps_{layer}"], p[0], atol=1e-5)
        entries = [(source, kind) for source in range(layer) for kind in (0, 1)][2 * layer - len(depth) :]
        for number, (source, kind) in enumerate(entries):
            share[layer, kind, source] = p[..., 12 + number].mean()
        # these probabilities and the values reproduce the result
        keys = [entry[0] for entry in depth]
        made = probabilities(projected[0], projected[1], keys, context.mask_b1ts)
        every = [projected[2], *(entry[1] for entry in depth)]
        values = [value.repeat_interleave(2, 1) for value in every]
        mixed = made[..., :12] @ values[0] + sum(made[..., 12 + j, None] * value for j, value in enumerate(values[1:]))
        torch.testing.assert_close(mixed.transpose(1, 2).flatten(2), result, rtol=1e-4, atol=1e-5)
        total[layer] = p[..., 12:].sum(-1).mean()
    np.testing.assert_allclose(found["moda_depth_share"], share, atol=1e-5)
    np.testing.assert_allclose(found["moda_depth_total"], total, atol=1e-5)
