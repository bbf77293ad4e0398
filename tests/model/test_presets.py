"""Properties that every preset of conf/model must have."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity

import depthlm
from depthlm.config import compose
from depthlm.config.validate.checks import check_together
from depthlm.locations import CONF
from depthlm.mechanisms.hyper_connections import State

from .. import options
from .conftest import PRESETS, configuration
from .gradients import loss_and_gradients, random_batch


# settings that start as vanilla, like the default ones, which `test_identity_start` has
@pytest.mark.parametrize(
    "overrides",
    [
        "model=dca model.connection.last_k=1 backbone=lm1b",
        "model=denseformer model.connection.period=2 model.connection.dilation=2 backbone=lm1b",
        "model=depth_attention model.attention.sources=relative model.attention.stride=4 backbone=olmo2",
    ],
)
def test_settings_that_initially_equal_vanilla(build, overrides):
    backbone = overrides.split()[-1]
    model, vanilla = (build(*o.split(), awake=False).double() for o in (overrides, f"model=vanilla {backbone}"))
    tokens, _ = random_batch()
    torch.testing.assert_close(model(tokens), vanilla(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixing", ["softmax", "scalars"])
def test_attention_residuals_are_initially_the_uniform_mean(build, mixing):
    model = build("model=attention_residuals", f"model.connection.mixing={mixing}", awake=False)
    state = model.connections[0].open(torch.randn(2, 3, 32))
    for connection in list(model.connections)[:-1]:
        ((h,), carry) = connection.read(state)
        torch.testing.assert_close(h, torch.stack(state.blocks).mean(0))
        state = connection.write(state, torch.randn(2, 3, 32), carry)
    torch.testing.assert_close(model.connections[-1].close(state), torch.stack(state.blocks).mean(0))


@pytest.mark.parametrize(("noise", "column_bound"), [(0.1, 5e-3), (8.0, 0.5)])
def test_the_residual_map_of_mhc_lies_on_its_manifold(build, noise, column_bound):
    """Rows are exact, since they are normalized last. Columns are approximate after 20 iterations."""
    model = build("model=mhc", awake=False)
    generator = torch.Generator().manual_seed(3)
    for connection in list(model.connections)[:-1]:
        with torch.no_grad():
            connection.bias += noise * torch.randn(connection.bias.shape, generator=generator)
        _, _, res = connection.weights(State(torch.randn(2, 5, 4, 32, generator=generator)))
        assert res.min() >= 0
        assert (res.sum(-1) - 1).abs().max() < 1e-6
        assert (res.sum(-2) - 1).abs().max() < column_bound


# parameters that by construction get no gradient in the first steps
UNMOVED = {
    # a single source has weight 1 for any score
    "attention_residuals": ["connections.0.query", "connections.0.key_norm"],
    "attention_residuals_kimi_k3": ["connections.0.query", "connections.0.key_norm"],
    "attention_residuals_full": ["connections.0.query", "connections.0.key_norm"],
    # the two sources, the embedding and the running sum, are equal, so any weights give the same result
    "attention_residuals_recency": ["connections.0.query", "connections.0.key_norm", "connections.0.recency"],
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_changes_within_three_steps(build, preset):
    model = build(f"model={preset}", "size.num_layers=2", awake=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(3):
        sums = model(*random_batch(seed=seed))
        optimizer.zero_grad()
        (sums.nll / sums.tokens).backward()
        optimizer.step()
    unmoved = [n for n, p in model.named_parameters() if torch.allclose(p, before[n], rtol=0, atol=1e-7)]
    assert sorted(unmoved) == sorted(UNMOVED.get(preset, []))


NO_DECAY = {"query", "scores", "recency", "a", "b", "w_of_grn", "static_pre", "static_post", "static_res", "gamma"}


@pytest.mark.parametrize("preset", PRESETS)
def test_depth_parameters_without_weight_decay(build, preset):
    model = build(f"model={preset}")
    groups = depthlm.model.optimizer_groups(model, 0.1)
    decay = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decay.keys() == dict(model.named_parameters()).keys()
    for name, value in decay.items():
        leaf = name.split(".")[-1]
        leaf = "w_of_grn" if leaf == "w" and preset.startswith(("grn", "dca")) else leaf
        if leaf in NO_DECAY:
            assert value == 0.0, name
        elif leaf in ("w", "phi", "up", "down") or (leaf == "weight" and "_proj" in name):
            assert value == 0.1, name


def test_a_cache_has_the_size_of_a_vanilla_cache(build):
    sizes = {}
    for preset in PRESETS:
        model = build(f"model={preset}")
        cache = model.make_cache()
        with torch.no_grad():
            model(random_batch()[0], cache=cache)
        sizes[preset] = cache.bytes()
    # two of the four layers reuse keys and values
    assert sizes.pop("shared_kv") == sizes["vanilla"] / 2
    assert set(sizes.values()) == {sizes["vanilla"]}


@pytest.mark.parametrize("awake", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_bf16_is_near_fp32(build, preset, awake):
    """awake: under autocast; else with all weights in bf16, as at ZeRO 1 and above."""
    model = build(f"model={preset}", awake=awake)
    expected, expected_grads = loss_and_gradients(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16, enabled=awake):
        loss, grads = loss_and_gradients(model if awake else model.bfloat16())
    torch.testing.assert_close(loss.float(), expected, rtol=2e-2, atol=0)
    largest = max(grad.norm() for grad in expected_grads.values())
    for name, grad in grads.items():
        if expected_grads[name].norm() > 1e-2 * largest:
            similarity = cosine_similarity(grad.float().flatten(), expected_grads[name].flatten(), dim=0)
            assert similarity > 0.95, name


@pytest.mark.parametrize("preset", PRESETS)
def test_shared_parameters_have_the_same_initial_values(build, preset):
    model, vanilla = (depthlm.build_model(configuration(f"model={name}")) for name in (preset, "vanilla"))
    ours = dict(model.named_parameters())
    for name, parameter in vanilla.named_parameters():
        if name in ours:
            assert torch.equal(ours[name], parameter), name
    assert preset in ("dca", "mudd", "shared_kv") or set(dict(vanilla.named_parameters())) <= set(ours)


@pytest.mark.slow
def test_every_model_fits_every_size():
    """Hydra composes each size, with another model; all choices of both would take it a minute."""
    for number, path in enumerate(sorted((CONF / "size").glob("*.yaml"))):
        for preset in PRESETS:
            config = options.configuration(f"model={preset}", f"size={path.stem}")
            assert check_together(config, {"model", "size"}) == []
        composed = compose([f"model={PRESETS[number % len(PRESETS)]}", f"size={path.stem}"], here=False)
        # the vocabulary of a size grows to that of the tokenizer
        assert composed.size == replace(config.size, vocab_size=composed.size.vocab_size)
        assert composed.size.vocab_size >= config.size.vocab_size
