"""The values of a training step: accumulation, stages, precisions, non-finite gradients, optimizers."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import depthlm
from depthlm.accounting.memory import MemoryEstimator
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.training.engine import build_engine
from depthlm.training.engine.sharding import PLAIN_LINEAR, deepspeed_settings
from depthlm.training.plan import learning_rate, make_plan
from depthlm.training.step import train_step

from .synthetic import built, losses, synthetic_tokens

# every stage, and every precision
QUICK_UPDATES = [("zero0", "bf16", 1e-4), ("zero2", "fp16", 1e-4), ("zero3", "fp32", 1e-6)]
OTHER_UPDATES = [("zero0", "fp32", 1e-6), ("zero1", "bf16", 1e-3), ("zero3_offload", "bf16", 1e-3)]


@pytest.mark.parametrize(
    ("sharding", "precision", "rtol"),
    [*QUICK_UPDATES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_UPDATES)],
)
@pytest.mark.usefixtures("fp16_on_the_cpu")
def test_updates_equal_plain_pytorch(small_run, sharding, precision, rtol):
    overrides = small_run(
        f"deepspeed={sharding}", f"precision={precision}", "schedule=constant",
        "optimizer.groups.embedding.weight_decay=0", "optimizer.groups.head.weight_decay=0.3",
        "optimizer.groups.vector.weight_decay=0.2", "optimizer.groups.matrix.lr_scale=0.5",
    )  # fmt: skip
    config = depthlm.compose([*overrides, "precision.initial_scale_power=8"])
    model = depthlm.build_model(config)
    if sharding != "zero0":
        model.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    scale = 2**8 if precision == "fp16" else 1
    master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    decays = {"embedding": 0.0, "head": 0.3, "matrix": config.optimizer.weight_decay, "vector": 0.2}
    groups: dict[str, list[torch.Tensor]] = {name: [] for name in decays}
    for (name, parameter), copy in zip(model.named_parameters(), master, strict=True):
        groups["vector" if parameter.dim() == 1 else "matrix" if "_proj" in name else name.split(".")[0]].append(copy)
    optimizer = torch.optim.AdamW(
        [{"name": name, "params": params, "weight_decay": decays[name]} for name, params in groups.items()],
        lr=config.optimizer.lr, betas=(0.9, 0.95), eps=config.optimizer.eps,
    )  # fmt: skip
    plan, expected = make_plan(config, ranks()), []
    for step, tokens in enumerate(synthetic_tokens(config, 4)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, plan, step) * (0.5 if group["name"] == "matrix" else 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and sharding == "zero0"):
            sums = model(tokens[:, :-1], tokens[:, 1:])
        (sums.nll / plan.tokens_per_step * scale).backward()
        expected.append(sums.nll.item() / plan.tokens_per_step)
        for copy, parameter in zip(master, model.parameters(), strict=True):
            copy.grad, parameter.grad = parameter.grad.float() / scale, None
        torch.nn.utils.clip_grad_norm_(master, config.training.gradient_clipping)
        optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(master, model.parameters(), strict=True):
                parameter.copy_(copy)
    actual = losses([*overrides, "precision.initial_scale_power=8"], 4)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0)


def test_an_ignored_sequence_gives_no_gradient_and_a_loss_of_0(small_run):
    config, plan, engine = built(small_run("schedule=constant"))
    (tokens,) = synthetic_tokens(config, 1)
    tokens[1] = ~tokens[1]
    model = depthlm.build_model(config)
    others = torch.cat((tokens[:1], tokens[2:]))
    expected = model(others[:, :-1], others[:, 1:]).nll
    norm = torch.stack([g.norm() for g in torch.autograd.grad(expected, list(model.parameters()))]).norm()
    batch = tokens.view(plan.accumulation, plan.micro_batch_size, -1)
    assert train_step(engine, batch, plan, 0.0) == pytest.approx(expected.item(), rel=1e-6)
    assert engine.grad_norm() == pytest.approx(norm.item() / plan.tokens_per_step, rel=1e-4)


def spoil(engine: Any, **added: float) -> Callable[[], None]:
    """Add values to the sums of the first micro-batch without changing its gradients. Returns the undo function."""
    seen: list[int] = []

    def add(model: Any, inputs: Any, sums: Any) -> Any:
        seen.append(1)
        return sums._replace(**{n: getattr(sums, n) + v for n, v in added.items()}) if len(seen) == 1 else sums

    return engine.model.register_forward_hook(add).remove


@pytest.mark.parametrize(
    "kind",
    [
        ["deepspeed=zero0"],
        ["deepspeed=zero3", "precision=bf16"],
        pytest.param(["deepspeed=zero1", "precision=bf16"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_non_finite_loss_or_gradient_never_reaches_the_weights(small_run, kind):
    overrides = small_run(*kind, "training.micro_batch_size=2")
    config, plan, _ = built(overrides)
    batch = synthetic_tokens(config, 1).view(2, 2, -1)

    def start() -> Any:
        engine = built(overrides)[2]
        train_step(engine, batch, plan, 0.1)
        return engine

    engine = start()
    before = engine.weights()

    def skipped_loss(highest: float = float("inf")) -> float:
        loss = float(train_step(engine, batch, plan, 0.1, highest))
        assert not engine.step_applied()
        assert all(torch.equal(before[name], value) for name, value in engine.weights().items())
        return loss

    poison = engine.model.final_norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    batch_loss = skipped_loss()
    poison.remove()
    for value in (float("inf"), float("-inf"), float("nan")):
        undo = spoil(engine, nll=value)
        assert not math.isfinite(skipped_loss())
        undo()
    undo = spoil(engine, z=float("inf"))
    assert skipped_loss() == batch_loss
    undo()
    assert skipped_loss(highest=float(np.nextafter(np.float32(batch_loss), np.float32(0)))) == batch_loss
    # skipped steps leave no trace in the next update
    other = start()
    for trained in (engine, other):
        train_step(trained, batch, plan, 0.1, highest=batch_loss)
        assert trained.step_applied()
    after, expected = engine.weights(), other.weights()
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert any(not torch.equal(before[name], expected[name]) for name in expected)
    # without a z-loss, the normaliser may be infinite
    spoil(engine, z=float("inf"))
    train_step(engine, batch, plan, 0.0)
    assert engine.step_applied()


def test_muon_equals_torchs_muon_combined_with_its_adamw(small_run):
    overrides = small_run("optimizer=muon", "schedule=constant", "training.gradient_clipping=0")
    config = depthlm.compose(overrides)
    model = depthlm.build_model(config)
    hidden = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embeddings = [model.embedding.weight, model.head.weight]
    adamw = torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": embeddings, "weight_decay": 0.1}],
                              betas=(0.9, 0.95))  # fmt: skip
    muon = torch.optim.Muon(hidden, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    plan, expected = make_plan(config, ranks()), []
    for step, tokens in enumerate(synthetic_tokens(config, 4)):
        for optimizer in (adamw, muon):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, plan, step)
        sums = model(tokens[:, :-1], tokens[:, 1:])
        (sums.nll / plan.tokens_per_step).backward()
        expected.append(sums.nll.item() / plan.tokens_per_step)
        for optimizer in (adamw, muon):
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad()
    torch.testing.assert_close(losses(overrides, 4), expected, rtol=1e-5, atol=0)


def test_the_memory_estimate_counts_the_gradients_of_bf16_at_stage_1(small_run):
    config, _, engine = built(small_run("deepspeed=zero1", "precision=bf16"))
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    in_fp32 = sum(flat.numel() * flat.element_size() for flat in engine.deepspeed.optimizer.fp32_groups_gradients_flat)
    # flat groups are slightly padded
    assert MemoryEstimator(config, "cpu").states(1, 1).gradients == pytest.approx(2 * count + in_fp32, rel=0.01)


@pytest.mark.parametrize(
    "kind",
    [
        ["model=dca", "backbone.tie_embeddings=true", "training.activation_checkpointing=true"],
        pytest.param(["model=moda", "model.loops=2", "training.activation_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param(["model=mhc", "model.connection.collapse=learned", "backbone=qwen3_moe"], marks=pytest.mark.slow),
        pytest.param(["model=depth_attention", "backbone=kimi_linear"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_zero_3_with_every_weight_sharded_gives_the_same_curve(small_run, monkeypatch, kind):
    def sharded(*arguments: Any) -> dict[str, Any]:
        settings = deepspeed_settings(*arguments)
        # by default DeepSpeed keeps small weights gathered, and small models gathered for the whole step
        for name in ("param_persistence_threshold", "max_reuse_distance", "max_live_parameters"):
            settings["zero_optimization"][f"stage3_{name}"] = 0
        return settings

    monkeypatch.setattr("depthlm.training.engine.deepspeed.deepspeed_settings", sharded)
    start_distributed(ranks())
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    def curve(stage: int) -> list[float]:
        config = depthlm.compose(small_run(f"deepspeed=zero{stage}", "training.micro_batch_size=2", *kind))
        plan, model = make_plan(config, ranks()), depthlm.build_model(config)
        model.activation_checkpointing = config.training.activation_checkpointing
        engine, tokens = build_engine(config, plan, model), synthetic_tokens(config, 1)[0]
        curve_losses, active_counts = [], set()
        for step in range(5):
            # also evaluate the model between training steps, and before the first one
            with torch.no_grad():
                curve_losses.append(model(tokens[:, :-1], tokens[:, 1:]).nll.item())
            if step < 4:
                curve_losses.append(float(train_step(engine, tokens.view(2, 2, -1), plan, 0.0)))
                active_counts.add(len(FWD_MODULE_STACK))
        assert len(active_counts) == 1
        assert all((parameter.numel() == 0) == (stage == 3) for parameter in model.parameters())
        return curve_losses

    torch.testing.assert_close(curve(3), curve(0), rtol=1e-5, atol=0)


def test_a_run_after_zero_3_uses_torchs_own_linear(small_run):
    losses(small_run("deepspeed=zero3"), 1)
    assert torch.nn.functional.linear is not PLAIN_LINEAR
    losses(small_run(), 1)
    assert torch.nn.functional.linear is PLAIN_LINEAR
