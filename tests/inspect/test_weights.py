"""The array of each picture equals weights that were set by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import depthlm
from depthlm.inspect import collect
from depthlm.locations import CONF

from ..options import option
from .conftest import TOKENS, composed

nan = float("nan")


def same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def shares(count: int) -> np.ndarray[Any, Any]:
    """Return `count` different weights that sum to one."""
    return np.arange(1, count + 1) / (count * (count + 1) / 2)


def test_keys_and_values_are_shared_within_a_loop(build, arrays):
    found = arrays(build("model=shared_kv", "model.loops=2"))["shared_kv_source"]
    assert np.nanargmax(found, 1).tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


def test_depth_attention_of_known_queries_and_keys(build, arrays):
    model = build("model=depth_attention", "model.attention.stride=2")
    q, k = np.array([0.0, 1.0, -1.0, 2.0]), np.array([0.5, -1.0, 1.5, 1.0])
    for layer, decoder_layer in enumerate(model.layers):
        attention = decoder_layer.attention
        for projection, value in ((attention.q_proj, q[layer]), (attention.k_proj, k[layer])):
            projection.weight.zero_()
            projection.bias.zero_()
            # only in the first key/value head; the weights of the other head remain uniform
            projection.bias.view(-1, 8)[: 2 if projection is attention.q_proj else 1, 0] = value * 8**0.25
    found = arrays(model)
    expected = np.full((4, 4, 2), nan)
    for layer, sources in enumerate(([0], [0, 1], [0, 2], [0, 2, 3])):
        scores = np.exp(q[layer] * k[sources])
        expected[layer, sources, 0] = scores / scores.sum()
        expected[layer, sources, 1] = 1 / len(sources)
    same(found["depth_attention_weights"], expected)


def test_attention_residuals_with_scalars(build, arrays):
    model = build("model=attention_residuals", "model.connection.mixing=scalars", "model.connection.block_size=3")
    counts = [1 + -(-sublayer // 3) for sublayer in range(9)]
    expected = np.full((9, counts[-1]), nan)
    for sublayer, count in enumerate(counts):
        model.connections[sublayer].scores.copy_(torch.tensor(shares(count)).log())
        expected[sublayer, :count] = shares(count)
    found = arrays(model)
    same(found["attention_residuals_weights_attention"], expected[:-1:2])
    same(found["attention_residuals_weights_mlp"], expected[1::2])
    same(found["attention_residuals_weights_final"], expected[-1])


def test_gates_of_layers_with_and_without_reads_of_q_k_and_v(build, arrays):
    setting = "model.connection.separate_qkv=[1]"
    model = build("model=attention_residuals", "model.connection.start=identity", setting)
    for number, connection in enumerate(model.connections[1:], 1):
        connection.gate.copy_(number + torch.arange(len(connection.gate)) / 10)
    found = arrays(model)
    same(found["attention_residuals_gate_qkv"][1], [2.0, 2.1, 2.2])
    # layer 1 has no single gate, and the first read has only the embedding
    assert np.isnan(found["attention_residuals_gate_attention"][1])
    same(found["attention_residuals_gate_attention"][2:, 0], [4.0, 6.0])
    same(found["attention_residuals_gate_mlp"][:, 0], [1.0, 3.0, 5.0, 7.0])


@pytest.mark.parametrize("version", [1, 2, 3])
def test_learned_biases_of_grn(build, arrays, version):
    model = build(f"model=grn_v{version}")
    expected = np.full((5, 5), nan)
    for layer, connection in enumerate(model.connections[::2]):
        values = torch.linspace(-1, 2, layer + 1) if layer else torch.tensor([0.5])
        widths = (slice(None), *((None,) if version > 1 else ()))
        connection.b[0] = values[widths]
        expected[layer, : layer + 1] = values
    found = arrays(model)
    over_hidden = np.repeat(expected[..., None], 16, -1) if version > 1 else expected
    same(found["dca_b_attention"][:, 0], over_hidden[:-1])
    same(found["dca_b_final"][0], over_hidden[-1])
    assert ("dca_weights_attention" in found) == (version == 3)
    if version == 3:
        # the gate is 0 where b is negative, since w is zero
        same(found["dca_weights_attention"][:, 0], np.maximum(expected[:-1], 0))
        assert np.nanmax(np.abs(found["dca_b_attention_deviation"])) < 1e-6


def test_the_distribution_of_biases_over_the_hidden_size(build, arrays):
    decoder = build("model=dca", "size.hidden_size=101", "size.head_size=8")
    for connection in decoder.connections[::2]:
        # the numbers from -50 to 50 in any order, around another number for each input and source
        inputs, sources, width = connection.b.shape
        around = 100 * torch.arange(inputs)[:, None, None] + torch.arange(sources)[:, None]
        connection.b.copy_(around + torch.randperm(width) - 50)
    found = arrays(decoder)
    expected_psl = np.where(np.tri(5, 5)[None] == 1, 100 * np.arange(3)[:, None, None] + np.arange(5), nan)
    expected = np.add.outer([-45, 0, 45], expected_psl.swapaxes(0, 1))
    same(found["dca_b_distribution_attention"], expected[:, :-1])
    same(found["dca_b_distribution_final"], expected[:, -1, :1])


def test_sum_of_older_blocks_gives_its_weight_to_each_block(build, arrays):
    model = build("model=dca", "model.connection.last_k=1", "model.connection.version=2")
    for connection in model.connections[::2]:
        for source in range(connection.b.shape[1]):
            connection.b[:, source] = source + 1.0
        connection.b[-1] *= 10
    found = arrays(model)
    expected = [[1, nan, nan, nan, nan], [1, 2, nan, nan, nan], [1, 2, 3, nan, nan], [1, 2, 2, 3, nan]]
    b_pl = found["dca_b_attention"].mean(-1).swapaxes(0, 1)
    same(b_pl, np.array([expected, expected, np.multiply(10, expected)]))
    same(found["dca_b_final"][0].mean(-1), [10, 20, 20, 20, 30])


def test_averages_of_denseformer(build, arrays):
    model = build("model=denseformer", "model.connection.period=2", "model.connection.dilation=2")
    model.connections[3].a.copy_(torch.tensor([0.25, 0.75]))
    model.connections[7].a.copy_(torch.tensor([-0.5, 0.5, 1.0]))
    expected = np.full((4, 5), nan)
    expected[1, [0, 2]] = [0.25, 0.75]
    expected[3, [0, 2, 4]] = [-0.5, 0.5, 1.0]
    same(arrays(model)["denseformer_a"], expected)


def test_weights_of_laurel(build, arrays):
    model = build("model=laurel", "model.connection.variant=rw")
    for sublayer, connection in enumerate(model.connections[:-1]):
        connection.alpha.fill_(sublayer / 10)
        connection.beta.fill_(1 - sublayer / 10)
    found = arrays(model)
    for part, first in (("attention", 0), ("mlp", 1)):
        alpha = np.arange(first, 8, 2) / 10
        same(found[f"laurel_weights_{part}"], np.stack([alpha, 1 - alpha], -1))
    model = build("model=laurel", "model.connection.last_k=2")
    model.connections[5].gamma.copy_(torch.tensor([0.5, -2.0]))
    found = arrays(model)
    same(found["laurel_gamma_attention"][0], [1, nan])
    same(found["laurel_gamma_mlp"][2], [0.5, -2.0])


def test_mixing_matrices_of_mhc_and_their_product(build, arrays):
    model = build("model=mhc", "model.connection.num_streams=2")
    mixing = [1 - sublayer / 10 for sublayer in range(8)]
    for keep, connection in zip(mixing, model.connections[:-1], strict=True):
        connection.alpha.zero_()
        # doubly stochastic, so Sinkhorn-Knopp does not change it
        matrix = torch.tensor([[keep, 1 - keep], [1 - keep, keep]]).clamp_min(1e-9)
        pre, post = torch.tensor([0.25, 0.75]).logit(), torch.tensor([0.5, 0.125]).logit()
        connection.bias.copy_(torch.cat([pre, post, matrix.log().flatten()]))
    found = arrays(model)
    matrices = [np.array([[keep, 1 - keep], [1 - keep, keep]]) for keep in mixing]
    same(found["mhc_res"], matrices)
    for part in ("attention", "mlp"):
        same(found[f"mhc_pre_{part}"], [[0.25, 0.75]] * 4)
        same(found[f"mhc_post_{part}"], [[1.0, 0.25]] * 4)
    for sublayer in range(8):
        same(found["mhc_res_composite"][sublayer], np.linalg.multi_dot([np.eye(2), *matrices[sublayer:][::-1]]))
    same(found["mhc_res_gain"], 1)
    same(found["mhc_res_composite_gain"], 1)


def test_gain_of_hyper_connections_is_that_of_the_ordered_product(build, arrays):
    model = build("model=hyper_connections", "model.connection.num_streams=2", "model.connection.dynamic=false")
    for connection in model.connections[:-1]:
        connection.static_res.copy_(torch.eye(2))
    first, last = np.array([[1.0, -3.0], [0.0, 2.0]]), np.array([[0.0, 1.0], [5.0, 0.5]])
    model.connections[2].static_res.copy_(torch.tensor(first))
    model.connections[6].static_res.copy_(torch.tensor(last))
    found = arrays(model)
    product = last @ first
    same(found["hyper_connections_res_gain"][2], [4, 5])
    same(found["hyper_connections_res_gain"][6], [5.5, 5])
    same(found["hyper_connections_res_composite"][0], product)
    same(
        found["hyper_connections_res_composite_gain"][:3],
        [[np.abs(product).sum(1).max(), np.abs(product).sum(0).max()]] * 3,
    )
    same(found["hyper_connections_res_composite_gain"][3:7], [[5.5, 5]] * 4)
    same(found["hyper_connections_res_composite_gain"][7], [1, 1])


@pytest.mark.parametrize("connection", sorted(path.stem for path in (CONF / "model/connection").glob("*.yaml")))
def test_the_sources_of_a_picture_are_not_those_of_the_batch(connection):
    config = composed()
    chosen = replace(config.model, connection=option("model/connection", connection))
    model = depthlm.build_model(replace(config, model=chosen)).eval().requires_grad_(False)
    shapes = [
        {name: array.shape for picture in collect(model, [tokens])[0] for name, array in picture.arrays.items()}
        for tokens in (TOKENS[:2], TOKENS[:3])
    ]
    assert shapes[0] == shapes[1]


def test_missing_pictures_are_reported(build):
    for overrides in (["model=vanilla"], ["model=laurel", "model.connection.variant=lr"]):
        pictures, (message,) = collect(build(*overrides), [TOKENS])
        assert not pictures
        assert "has no figure of its own" in message
