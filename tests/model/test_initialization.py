import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from depthlm.mechanisms.deepnorm import DeepNorm
from depthlm.mechanisms.residual import Residual
from depthlm.model.decoder import Decoder
from depthlm.model.parameters import initialize


def test_a_parameter_depends_only_on_seed_and_name():
    class Two(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(8, 8))

    a, b = Two(["first", "second"]), Two(["second", "other", "first"])
    initialize(a, seed=3, std=0.1)
    initialize(b, seed=3, std=0.1)
    assert torch.equal(a.first.weight, b.first.weight)
    assert torch.equal(a.second.weight, b.second.weight)
    assert not torch.equal(a.first.weight, a.second.weight)
    initialize(b, seed=4, std=0.1)
    assert not torch.equal(a.first.weight, b.first.weight)


def test_initial_distributions(make_decoder):
    model = make_decoder("moda_layers")
    initialize(model, seed=1, std=0.02)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert 0.018 < parameter.std() < 0.022, name
            assert abs(parameter.mean()) < 0.002, name


@pytest.mark.parametrize("position", ["rope", "sinusoidal"])
def test_the_embedding_may_have_its_own_standard_deviation(make_decoder, position):
    model = make_decoder(backbone_changes={"position": position})
    scaled = make_decoder(backbone_changes={"position": position}, embedding_init_std=0.5)
    for decoder in (model, scaled):
        initialize(decoder, seed=1, std=0.02)
    for name, parameter in model.named_parameters():
        factor = {"rope": 25, "sinusoidal": 0.5}[position] if name == "embedding.weight" else 1
        torch.testing.assert_close(scaled.get_parameter(name), factor * parameter)


def test_the_truncated_normal_of_olmo2_ends_at_three_standard_deviations(make_decoder):
    model = make_decoder("olmo2")
    initialize(model, seed=1, std=0.02, backbone=replace(model.backbone, init="truncated_normal"))
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    values = torch.cat([p.flatten() for p in matrices.values()])
    assert values.abs().max() <= 0.06
    # of a normal distribution that is cut off at 3 standard deviations
    assert values.std().item() == pytest.approx(0.02 * 0.9866, rel=0.01)
    assert "embedding.weight" in matrices


def test_kernels_of_flaxs_lm1b_example_are_xavier_uniform_and_biases_almost_zero(make_decoder):
    model = make_decoder("lm1b")
    initialize(model, 1, 0.02, backbone=replace(model.backbone, init="xavier_uniform", bias_init_std=1e-6))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name
        elif parameter.dim() == 1:
            assert 0 < parameter.abs().max() < 6e-6, name
        elif name == "embedding.weight":
            assert parameter.std().item() == pytest.approx(1, rel=0.1)
        else:
            bound = math.sqrt(6 / sum(parameter.shape))
            assert 0.95 * bound < parameter.abs().max() <= bound, name


def test_deepnorm_scales_the_values_of_latent_attention_and_not_its_keys(make_decoder):
    latent = {"mixers": ["latent"], "position": "none", "mlp": "swiglu", "qk_norm": "none"}
    plain, scaled = (
        make_decoder(backbone_changes=latent, connection=connection, num_layers=2).layers[0].attention
        for connection in (Residual, DeepNorm)
    )
    of_both = (each.kv_b_proj.weight.unflatten(0, (each.num_heads, 2, -1)) for each in (plain, scaled))
    for ours, theirs, factor in zip(*(weight.unbind(1) for weight in of_both), (1, (8 * 2) ** -0.25), strict=True):
        torch.testing.assert_close(theirs, ours * factor)


def test_initialization_from_meta_and_in_bf16(make_decoder):
    model = make_decoder()
    initialize(model, seed=5, std=0.02)
    with torch.device("meta"):
        other = Decoder(model.size, model.backbone, type(model.connections[0]), type(model.layers[0].attention))
    other = other.bfloat16().to_empty(device="cpu")
    initialize(other, seed=5, std=0.02)
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter.bfloat16()), name
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(other(tokens).float(), model(tokens), atol=0.05, rtol=0)


def test_a_module_initializes_its_own_parameters():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.empty(3))

    class InitializedGate(Gate):
        def init_parameter(self, name, tensor, generator, std):
            tensor.fill_(7.0)

    module = InitializedGate()
    initialize(module, seed=0, std=0.02)
    assert module.gate.tolist() == [7.0] * 3
    with pytest.raises(TypeError, match=r"0\.gate: Gate owns this parameter and has no init_parameter"):
        initialize(nn.Sequential(Gate()), seed=0, std=0.02)
