import pytest
import torch
import torch.nn.functional as F

from depthlm.ops.functions import GatedProduct, GatedProjection, linear_joined, linear_together, rms_norm


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rms_norm_computes_in_fp32():
    x, weight = random(64, 256).bfloat16(), torch.ones(256)
    expected = F.rms_norm(x.float(), (256,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.bfloat16(), rtol=2**-7, atol=0)


def recomputed(gate, up, weight, bias):
    """The operators of a GPU."""
    return GatedProjection.apply(GatedProduct.apply(gate, up), gate, up, weight, bias)


@pytest.mark.parametrize("bias", [None, random(4, seed=3).requires_grad_()])
def test_the_gated_projection_equals_its_definition(bias):
    gate, up, weight = random(2, 3, 8), random(2, 3, 8, seed=1), random(4, 8, seed=2)
    inputs = [*(x.requires_grad_() for x in (gate, up, weight)), bias]
    torch.testing.assert_close(recomputed(*inputs), F.linear(F.silu(gate) * up, weight, inputs[3]))
    assert torch.autograd.gradcheck(recomputed, inputs)


def test_the_gated_projection_saves_only_the_gate_and_the_value():
    inputs, saved = [random(2, 3, 8, seed=seed).requires_grad_() for seed in range(2)], []
    weight = random(4, 8, seed=2).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        recomputed(*inputs, weight, None)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (*inputs, weight)}


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_for_several_layers_equals_one_for_each(bias):
    layers = [torch.nn.Linear(8, width, bias=bias, dtype=torch.float64) for width in (6, 3, 1)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    x = random(2, 5, 8).requires_grad_()
    results = []
    for function in (linear_joined, linear_together):
        outputs = function(x, *layers)
        results.append((*outputs, *torch.autograd.grad(sum(y.sin().sum() for y in outputs), [x, *weights])))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
