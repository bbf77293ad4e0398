"""Experts that are spread over ranks: the same run as on one rank, resumed, converted, and with uneven loads."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import depthlm
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.model import Decoder
from depthlm.model.experts import Experts, Spread
from depthlm.model.experts.experts import expert_ends
from depthlm.model.parameters import part_of
from depthlm.runs.records import read_metrics
from depthlm.training.engine import build_engine, draw_spread
from depthlm.training.plan import make_plan

from ..forks import Forks
from ..two_ranks import TwoRanks, train_on_ranks
from .run_files import assert_close, assert_same, curve, manifest, train_three
from .synthetic import synthetic_tokens
from .test_experts import ROUTERS, biases, records

# the norm of the gradient is above 1, so all steps are clipped; both auxiliary losses and the bias balance the experts
EXPERTS = (*ROUTERS, "backbone.router_balance_loss=0.1", "backbone.router_z_loss=0.01", "backbone.shared_experts=1",
           "training.gradient_clipping=0.5", "training.micro_batch_size=1")  # fmt: skip
SPREAD = (*EXPERTS, "deepspeed.experts=2")


@pytest.fixture(scope="module")
def four_ranks(forks: Forks) -> Iterator[TwoRanks]:
    """Four processes that train together."""
    processes = TwoRanks(forks, 4)
    yield processes
    processes.close()


@pytest.mark.slow
# Muon's updates are computed in bf16
@pytest.mark.parametrize(("stage", "optimizer", "tolerance"), [("zero2", "adamw", 1e-5), ("zero0", "muon", 3e-4)])
def test_spread_experts_equal_those_of_one_rank_and_a_resumed_run_equals_both(train_run, stage, optimizer, tolerance):
    # three validation windows for two ranks; a sample and the norms of sublayers pass through the experts as well
    given = (f"deepspeed={stage}", f"optimizer={optimizer}", "training.validation_tokens=80",
             "training.validate_every=3", "training.sample=depth", "training.log_blocks_every=2")  # fmt: skip
    one, two, _ = train_three(train_run, *SPREAD, *given, of_one=("deepspeed.experts=1",))
    assert_close(two, one, tolerance, 20 * tolerance)
    # all steps are clipped
    assert min(row[4] for row in curve(two)) > 0.5
    losses = [
        [row["validation/local/loss"] for row in read_metrics(path / "metrics.jsonl") if row["step"] in (3, 6)]
        for path in (one, two)
    ]
    torch.testing.assert_close(*losses, rtol=tolerance, atol=0)
    if optimizer == "adamw":
        torch.testing.assert_close(records(one)[-1]["load"], records(two)[-1]["load"])
        assert_same(dict(enumerate(biases(one))), dict(enumerate(biases(two))))
        assert any(bias_e.any() for bias_e in biases(two))
    assert manifest(two)["experts"] == 2


@pytest.mark.slow
def test_a_run_whose_experts_are_spread_over_other_ranks_at_each_step_equals_one_rank(
    four_ranks, train_run, small_run, tmp_path
):
    given = (*EXPERTS, "deepspeed=zero1")
    # the ranks, and over how many of them the experts are spread, until each step
    for stop, (ranks_now, count) in enumerate(((4, 4), (4, 2), (2, 2), (2, 1), (1, 1), (2, 2)), 1):
        stopped = (*given, f"training.stop_after={stop}", f"deepspeed.experts={count}", "training.keep_last=9")
        if ranks_now == 4:
            assert four_ranks(train_on_ranks, small_run(*stopped, name="moved")) == [0] * 4
        else:
            train_run(*stopped, ranks=ranks_now, name="moved")
    assert_close(tmp_path / "moved", train_run(*given, name="one"), 1e-5, 2e-4)


def outputs(experts: Experts, x_rd: Tensor, experts_rk: Tensor, weights_rk: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the gradient of the inputs."""
    x_rd = x_rd.clone().requires_grad_()
    y_rd = experts(x_rd, experts_rk, weights_rk, expert_ends(experts_rk, 4))
    (y_rd.square().sum()).backward()
    assert x_rd.grad is not None
    return y_rd.detach(), x_rd.grad


def unequal_outputs(chosen: list[int]) -> list[str]:
    """Send all tokens of both ranks to these two experts. Return what differs from experts that are not spread."""
    torch.manual_seed(0)
    whole, own = Experts(4, 16, 32), Experts(4, 16, 32)
    spread = Spread(torch.distributed.group.WORLD, ranks().rank, 2)
    for name, parameter in whole.named_parameters():
        torch.nn.init.normal_(parameter)
        own.keep(name, parameter.detach(), spread)
    x_rd, weights_rk = torch.randn(2, 6, 16), torch.rand(2, 6, 2)
    experts_rk = torch.tensor(chosen).expand(2, 6, 2)
    expected = [outputs(whole, x_rd[rank], experts_rk[rank], weights_rk[rank]) for rank in range(2)][ranks().rank]
    actual = outputs(own, x_rd[ranks().rank], experts_rk[ranks().rank], weights_rk[ranks().rank])
    pairs = {"y": (actual[0], expected[0]), "x.grad": (actual[1], expected[1])}
    for name, parameter in own.named_parameters():
        gradient = whole.get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        pairs[name] = parameter.grad, part_of(parameter, gradient)
    return [name for name, (one, other) in pairs.items() if torch.dist(one, other) > 1e-5 * (1 + other.norm())]


def test_a_rank_without_tokens_takes_part(two_ranks):
    for chosen in ([0, 1], [3, 2], [1, 2]):
        assert two_ranks(unequal_outputs, chosen) == [[], []]


def spread_model(config: Config) -> Decoder:
    """Return a model of which this rank has its own experts only."""
    model = depthlm.build_model(config, "meta")
    draw_spread(config, model, torch.device("cpu"))
    return model


def step_with_a_bad_expert(overrides: list[str]) -> tuple[bool, bool]:
    """Take a step in which the gradient of an expert of rank 1 is not finite. Return whether it was applied, and
    whether an expert of this rank changed."""
    config = depthlm.compose(overrides)
    model = spread_model(config)
    engine = build_engine(config, make_plan(config, ranks()), model)
    tokens = synthetic_tokens(config, 1)[0].unflatten(0, (2, -1))[ranks().rank]
    weight = model.mixtures()[0].experts.up_proj
    before = weight.detach().clone()
    engine.set_learning_rate(0.1)
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]).nll)
    if ranks().rank == 1:
        assert weight.grad is not None
        weight.grad[0, 0, 0] = torch.nan
    engine.step()
    result = engine.step_applied(), not torch.equal(weight, before)
    engine.destroy()
    return result


def test_a_bad_gradient_of_an_expert_skips_the_update_on_all_ranks(two_ranks, small_run):
    overrides = small_run(*SPREAD, "training.micro_batch_size=2")
    assert two_ranks(step_with_a_bad_expert, overrides) == [(False, False)] * 2
