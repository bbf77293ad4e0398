import copy

import pytest
import torch
import torch.nn.functional as F

from depthlm.model import compile_sublayers

from .conftest import BACKBONES
from .gradients import assert_same


def batch(length=16, vocabulary=512, seed=0):
    tokens = torch.randint(0, vocabulary, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -100
    return tokens[:, :-1], targets


@pytest.mark.parametrize("backbone", BACKBONES)
def test_loss_sums(make_decoder, backbone):
    model = make_decoder(backbone)
    tokens, targets = batch()
    logits = model(tokens)
    sums = model(tokens, targets)
    assert sums.tokens == (targets != -100).sum()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(sums.nll, expected)
    torch.testing.assert_close(sums.z, logits.logsumexp(-1)[targets != -100].square().sum())
    expected.backward()
    expected_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(tokens, targets).nll.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_grads[name], atol=2e-4, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_compile_with_inductor_compiles_each_region_once_for_all_layers(make_decoder):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = make_decoder(num_layers=4)
    other = copy.deepcopy(model)
    compile_sublayers(other)
    assert_same(model, other, 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
