"""The optimizers: their settings, the bytes of their states, and optimizers of the user."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import depthlm
from depthlm.accounting.memory import MemoryEstimator
from depthlm.config import ConfigError, compose
from depthlm.optimizers.build import build_optimizer, state_bytes
from depthlm.optimizers.muon import MuonAndAdamW
from depthlm.runs.records import read_metrics
from depthlm.training import train

# of pytorch_optimizer
LIBRARY = ("ademamix", "soap", "schedule_free")
SIGN = """
# The sign of the gradient
name: sign
_target_: my_optimizers.Sign
needs_matrices: true
settings:
  share: 0.5
"""
CODE = """
import torch

class Sign(torch.optim.Optimizer):
    def __init__(self, groups, lr, share):
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: must be above 0 and at most 1")
        super().__init__(groups, {"lr": lr})
        self.share = share

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = self.state[parameter].setdefault("rows", torch.zeros_like(parameter[:1]))
                parameter.sub_(rows + self.share * group["lr"] * parameter.grad.sign())
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder with optimizers of the user, and the module of one of them on PYTHONPATH."""
    (tmp_path / "conf/optimizer").mkdir(parents=True)
    (tmp_path / "conf/optimizer/sign.yaml").write_text(SIGN)
    (tmp_path / "my_optimizers.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "conf"


@pytest.mark.parametrize(
    ("name", "backbone"),
    [
        *((name, "qwen3") for name in ("sign", "soap")),
        ("muon", "qwen3_moe"),
        *(pytest.param(name, "qwen3", marks=pytest.mark.slow) for name in ("adamw", "ademamix", "schedule_free")),
    ],
)
def test_the_bytes_of_the_states_equal_those_of_an_optimizer_after_a_step(mine, name, backbone):
    if name in LIBRARY:
        pytest.importorskip("pytorch_optimizer")
    given = ["size=micro", "model=dca", f"backbone={backbone}", f"optimizer={name}", "schedule=constant"]
    config = compose(given, mine, here=False)
    model = depthlm.build_model(config)
    optimizer = build_optimizer(model, config.optimizer)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens).nll.backward()
    optimizer.step()
    # SOAP's states are lists, and as many other values as tensors
    tensors = [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor)]
    assert len(tensors) >= len(list(model.parameters()))
    assert state_bytes(depthlm.build_model(config, "meta"), config.optimizer) == sum(t.nbytes for t in tensors)
    assert MemoryEstimator(config, "cuda").states(0, 1).optimizer == sum(t.nbytes for t in tensors)


def with_muon(stack: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return a stack of experts after an update for each gradient."""
    tensors = {"matrix": torch.ones(2, 2), "experts": stack.clone(), "vector": torch.ones(2)}
    groups = [
        {"params": [nn.Parameter(tensor)], "kind": kind, "lr": 0.02, "weight_decay": 1.0}
        for kind, tensor in tensors.items()
    ]
    optimizer = MuonAndAdamW(groups, 0.02, (0.9, 0.95), 1e-8)
    experts = groups[1]["params"][0]
    for gradient in gradients:
        experts.grad = gradient
        optimizer.step()
    return experts.detach()


@pytest.mark.parametrize("shape", [(4, 24, 40), (4, 40, 24)], ids=["wide", "tall"])
def test_muon_updates_each_expert_as_torchs_muon_updates_its_matrix_alone(shape):
    torch.manual_seed(0)
    stack, *gradients = torch.randn(5, *shape)
    # experts that get few tokens have small gradients, those that get none have gradients of zero
    scales = torch.tensor([1.0, 1e-3, 1e-6, 0.0]).view(-1, 1, 1)
    gradients = [gradient * scales for gradient in gradients]
    updated = with_muon(stack, gradients)
    for index, matrix in enumerate(stack):
        alone = nn.Parameter(matrix.clone())
        muon = torch.optim.Muon([alone], 0.02, weight_decay=1.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            alone.grad = gradient[index]
            muon.step()
        assert index == 3 or (alone - matrix * 0.98**4).abs().max() > 0.01
        torch.testing.assert_close(updated[index], alone.detach(), rtol=0, atol=1e-4)
    # a rank that holds some of the experts computes the same updates
    some = with_muon(stack[1:3], [gradient[1:3] for gradient in gradients])
    torch.testing.assert_close(some, updated[1:3], rtol=0, atol=1e-4)


def test_muon_updates_a_stage_of_a_pipeline_that_has_only_matrices():
    matrix = nn.Parameter(torch.eye(3))
    groups = [{"params": [matrix], "kind": "matrix", "lr": 0.5, "weight_decay": 0.0}]
    matrix.grad = torch.eye(3)
    MuonAndAdamW(groups, 0.5, (0.9, 0.95), 1e-8).step()
    assert (matrix.diagonal() < 1).all()


def test_an_optimizer_of_the_user_trains_and_resumes(mine, small_run, tmp_path):
    for steps in (2, 4):
        more = ("training.max_steps=4", f"training.stop_after={steps}")
        assert train(depthlm.compose(small_run("optimizer=sign", *more), mine)) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_an_optimizer_of_the_user_states_what_it_refuses(mine):
    for overrides, error in (
        (["optimizer.settings.share=2"], "optimizer.settings.share=2: must be above 0 and at most 1"),
        (["optimizer.settings.share=x"], "optimizer: my_optimizers.Sign: '<' not supported between instances of 'int' "
                                         "and 'str'; its settings are {'share': 'x'}"),
        (["deepspeed=zero1"], "optimizer=sign with deepspeed.stage=1: my_optimizers.Sign needs whole matrices, which "
                              "ZeRO 1 and above flatten; allowed: deepspeed=zero0, which runs on many ranks as well"),
        (["+optimizer.settings.shar=1"], "optimizer.settings.shar: my_optimizers.Sign has no such setting; "
                                         "allowed: share; did you mean `share`?"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            compose(["optimizer=sign", *overrides], mine, here=False)
        assert refused.value.errors == [error]


def test_what_a_librarys_optimizer_needs_is_refused_with_what_is_allowed(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pytorch_optimizer", None)
        with pytest.raises(ConfigError, match=r"pytorch_optimizer is not installed; pip install .*optimizers"):
            compose(["optimizer=soap"], here=False)
    pytest.importorskip("pytorch_optimizer")
    for overrides, error in (
        (["optimizer=soap", "deepspeed=zero2"], "optimizer=soap with deepspeed.stage=2: pytorch_optimizer.SOAP needs "
                                                "whole matrices"),
        (["optimizer=schedule_free"], "optimizer=schedule_free with schedule.name=cosine.*allowed: schedule=constant"),
        (["optimizer=schedule_free", "schedule=constant", "backbone=qwen3_moe", "deepspeed.experts=2"],
         "optimizer=schedule_free with deepspeed.experts=2: spread experts are resumed from the exported weights"),
        (["optimizer=ademamix", "optimizer.betas=[0.9,0.95]"], "three numbers from 0 to below 1"),
        (["optimizer=ademamix", "optimizer.settings.alpha=-1"], "optimizer: pytorch_optimizer.AdEMAMix: .*alpha"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=error):
            compose(["size=micro", *overrides], here=False)
