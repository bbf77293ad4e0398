"""Routers choose the experts of transformers' routers, and their auxiliary losses are those of the papers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from depthlm.model.experts import Mixture, Router, balance
from depthlm.model.shape import Backbone, Size


@pytest.fixture
def make_router(make_size: Callable[..., Size], make_backbone: Callable[..., Backbone]) -> Callable[..., Router]:
    def make(experts: int = 12, top_k: int = 3, **settings: Any) -> Router:
        size = make_size(hidden_size=16, num_experts=experts, experts_per_token=top_k)
        router = Router(size, make_backbone("qwen3_moe", **settings))
        router.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        return router

    return make


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_scores_bias_and_groups_equal_deepseek_v3_of_transformers(make_router, groups, kept, normalize):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    router = make_router(
        router_scores="sigmoid", router_normalize=normalize, router_scale=2.5, router_groups=groups,
        router_groups_kept=kept, router_bias_rate=0.001,
    )  # fmt: skip
    router.bias_e.copy_(0.1 * torch.randn(12, generator=torch.Generator().manual_seed(2)))
    theirs = DeepseekV3TopkRouter(
        SimpleNamespace(
            num_experts_per_tok=3, num_local_experts=12, routed_scaling_factor=2.5, n_group=groups, topk_group=kept,
            norm_topk_prob=normalize, hidden_size=16, n_routed_experts=12, topk_method="noaux_tc",
        )
    )  # fmt: skip
    theirs.weight.data.copy_(router.weight)
    theirs.e_score_correction_bias.copy_(router.bias_e)
    x = torch.randn(50, 16)
    choice, (_, weights, numbers) = router(x), theirs(x)
    order = numbers.argsort(1)
    ours = choice.experts_rk.argsort(1)
    assert torch.equal(choice.experts_rk.gather(1, ours), numbers.gather(1, order))
    torch.testing.assert_close(choice.weights_rk.gather(1, ours), weights.gather(1, order))
    chosen_groups = (choice.experts_rk // (12 // groups)).tolist()
    assert all(len(set(row)) <= kept for row in chosen_groups)


def test_the_auxiliary_losses_are_those_of_transformers_and_of_a_literal_formula(make_router):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    router, x = make_router().double(), torch.randn(40, 16, dtype=torch.float64)
    routing = router(x).routing
    logits = x @ router.weight.T
    expected = load_balancing_loss_func((logits,), 12, 3)
    torch.testing.assert_close(routing.balance, expected.double(), rtol=1e-6, atol=0)
    p = logits.softmax(-1)
    shares = torch.stack([(p.topk(3).indices == i).sum() / 120 for i in range(12)])
    torch.testing.assert_close(routing.balance, 12 * (3 * shares * p.mean(0)).sum())
    torch.testing.assert_close(routing.z, torch.log(logits.exp().sum(-1)).square().mean())
    torch.testing.assert_close(routing.entropy, -(p * p.log()).sum(-1).mean())
    assert torch.equal(routing.load_e, 120 * shares)
    assert routing.balance.requires_grad
    assert routing.z.requires_grad


def test_the_loss_of_a_model_has_the_auxiliary_losses_with_their_weights(make_decoder):
    model = make_decoder("olmoe", head_size=32, num_layers=3)
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    sums = model(tokens[:, :-1], tokens[:, 1:])
    assert sums.routing is not None
    assert sums.routing.load_e.shape == (3, 8)
    expected = 32 * (0.00125 * sums.routing.balance.mean() + 0.001 * sums.routing.z.mean())
    torch.testing.assert_close(sums.penalty, expected)
    torch.testing.assert_close(sums.total(0.1), sums.nll + 0.1 * sums.z + expected)
    dense = make_decoder("qwen3")(tokens[:, :-1], tokens[:, 1:])
    assert dense.routing is None
    assert torch.equal(dense.total(0.0), dense.nll)


def test_the_bias_keeps_its_precision_in_a_model_in_bf16(make_router):
    router = make_router(router_bias_rate=0.001)
    router.bias_e += 1.001
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert router.bias_e.dtype == torch.float32
    assert torch.equal(router.bias_e, torch.full((12,), 1.001))


@pytest.mark.parametrize("loops", [1, 2])
def test_a_step_of_the_bias_raises_it_for_idle_experts_only(make_decoder, loops):
    model = make_decoder("qwen3", num_layers=2, num_experts=4)
    backbone = Backbone(mlp="experts", router_bias_rate=0.5, dense_layers=0)
    mixtures = [Mixture(model.size, backbone) for _ in range(2)]
    load = torch.tensor([[4.0, 1.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    more = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    balance(mixtures, torch.cat([load, more]) if loops == 2 else load)
    assert mixtures[0].router.bias_e.tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert mixtures[1].router.bias_e.tolist() == ([0.0] * 4 if loops == 1 else [0.5, 0.5, -0.5, 0.5])
