"""Graphs of micro-batches: replays compute what ordinary steps compute, bit for bit.

Without a GPU, a backend of the tests "replays" by running the captured function again on its static inputs.
"""

import functools
import logging
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import depthlm
from depthlm.config import Config
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.training import train
from depthlm.training.engine import Engine, build_engine
from depthlm.training.graphs import Captured, MicroBatchGraphs, make_graphs
from depthlm.training.plan import Plan, make_plan
from depthlm.training.step import train_step

from ..options import configuration
from .run_files import assert_same, assert_same_run, curve, weights
from .spoiled import train_spoiled
from .synthetic import synthetic_tokens

# two without a graph, one that captures, two that only replay, the first of which is skipped as a spike
STEPS, SKIPPED = 5, 3
SMALL = ("size=micro", "training.sequence_length=16", "training.batch_size=4", "training.micro_batch_size=2",
         "precision=fp32")  # fmt: skip
# each of these models once, with what a graph could miss
CASES = {
    "dropout": "model=depth_attention backbone.dropout=0.1 training.activation_checkpointing=true",
    "selective": "model=denseformer training.activation_checkpointing=selective",
    "bf16": "model=attention_residuals precision=bf16",
    "loops": "model=dca model.loops=2",
    "experts": "backbone=qwen3_moe model=moda",
    "one micro-batch": "model=mhc training.micro_batch_size=4",
    "weights in averages": "optimizer=schedule_free schedule=constant",
    "muon": "optimizer=muon",
}
QUICK = ("dropout", "experts", "one micro-batch")


class Rerun:
    """Replays by running the function again. As on a GPU, a capture computes nothing, and results have fixed places.

    fails_at: the number of the capture that fails, from 1; None: none.
    """

    def __init__(self, model: nn.Module, fails_at: int | None = None) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.fails_at, self.captures = fails_at, 0
        self.waits: list[str] = []

    def warm_up(self) -> AbstractContextManager[list[str]]:
        return nullcontext(self.waits)

    def reset(self) -> None:
        pass

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def capture(self, function: Callable[[], Any]) -> Captured:
        self.captures += 1
        given = [p.grad for p in self.parameters]
        copies = [None if x is None else x.clone() for x in given]
        results = function()
        static = [p.grad for p in self.parameters]
        for x, gradient, copy in zip(static, given, copies, strict=True):
            assert gradient is None or gradient is x, "a later micro-batch must add to the same gradient"
            if x is not None:
                x.fill_(torch.nan) if copy is None else x.copy_(copy)
        if self.captures == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        places = [x.fill_(-1) for x in tree_leaves(results) if isinstance(x, Tensor)]

        def replay() -> None:
            for parameter, gradient in zip(self.parameters, given, strict=True):
                parameter.grad = gradient
            again = tree_leaves(function())
            for place, new in zip(places, [x for x in again if isinstance(x, Tensor)], strict=True):
                place.copy_(new)
            for parameter, x in zip(self.parameters, static, strict=True):
                if x is not None and parameter.grad is not x:
                    x.copy_(parameter.grad)

        return Captured(replay, results)


def rerun_graphs(config: Config, plan: Plan, engine: Engine, fails_at: int | None = None) -> MicroBatchGraphs:
    """Return what takes the place of `make_graphs`."""
    return MicroBatchGraphs(engine, config.training.z_loss, plan.loss_factor, Rerun(engine.model, fails_at))


def trained(overrides: list[str], graphs: Callable[..., Any] = lambda *_: None) -> Any:
    """Return losses, norms and whether updates were applied in STEPS steps, the weights after them, and the graphs."""
    torch.set_num_threads(1)
    config = configuration(*SMALL, "training.z_loss=0.1", *overrides)
    start_distributed(ranks())
    plan, model = make_plan(config, ranks()), depthlm.build_model(config)
    model.checkpoint_activations(config.training.activation_checkpointing)
    model.mask_documents(config.data.document_mask, 3)
    engine = build_engine(config, plan, model)
    made, steps = graphs(config, plan, engine), []
    for number, tokens in enumerate(synthetic_tokens(config, STEPS)):
        engine.set_learning_rate(0.01)
        batch = tokens.view(plan.world_size, plan.accumulation, plan.micro_batch_size, -1)[ranks().rank]
        if made is not None:
            made.make_room(batch)
        seeds = torch.arange(4, dtype=torch.int32).view(*batch.shape[:2]) + number
        # skips the update of a replay
        limit = 1.0 if number == SKIPPED else torch.inf
        loss = train_step(engine, batch, plan, 0.1, limit, seeds=seeds, graphs=made)
        steps.append((loss, engine.grad_norm(), engine.step_applied()))
    after = {name: x.detach().clone() for name, x in model.state_dict().items()}
    engine.destroy()
    return steps, after, made


@functools.cache
def ordinary(*overrides: str) -> Any:
    """Return the steps of a run without graphs, and the weights after them."""
    return trained([*overrides])[:2]


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)],
)
def test_replays_equal_ordinary_steps(case):
    overrides = CASES[case].split()
    expected, weights_after = ordinary(*overrides)
    steps, after, graphs = trained(overrides, rerun_graphs)
    assert (graphs.captured, graphs.reason) == (1 if case == "one micro-batch" else 2, None)
    assert steps == expected
    assert [applied for *_, applied in steps] == [number != SKIPPED for number in range(STEPS)]
    assert_same(after, weights_after)


def test_a_capture_that_fails_loses_nothing(caplog):
    expected, weights_after = ordinary("model=moda")
    for fails_at in (1, 2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "depthlm"):
            steps, after, graphs = trained(["model=moda"], functools.partial(rerun_graphs, fails_at=fails_at))
        assert steps == expected
        assert_same(after, weights_after)
        assert graphs.captured == fails_at - 1
        assert not graphs.graphs
        [message] = [record.message for record in caplog.records if "CUDA graphs" in record.message]
        assert "test_graphs.py:" in message
        assert message.endswith("in capture: operation not permitted when stream is capturing")


def test_code_that_waits_is_found_before_a_capture():
    def waiting(*arguments: Any) -> MicroBatchGraphs:
        graphs = rerun_graphs(*arguments)
        graphs.backend.waits += ["mechanism.py:7"]
        return graphs

    steps, _, graphs = trained([], waiting)
    assert (graphs.captured, graphs.reason) == (0, "the host waits for the GPU at mechanism.py:7")
    assert steps == ordinary()[0]


def test_layers_that_draw_random_numbers_are_not_recomputed_in_a_graph(caplog):
    def drawing(*arguments: Any) -> MicroBatchGraphs:
        graphs = rerun_graphs(*arguments)
        graphs.engine.model.layers[0].register_forward_hook(lambda *_: torch.rand(1) and None)
        return graphs

    *_, graphs = trained(["training.activation_checkpointing=true"], drawing)
    assert graphs.captured == 0
    assert "random numbers" in graphs.reason


def test_weights_that_move_are_captured_again():
    def moving(*arguments: Any) -> MicroBatchGraphs:
        graphs, moved = rerun_graphs(*arguments), arguments[2].model.head.weight

        def move(*_: Any) -> None:
            if graphs.captured == 2 and graphs.steps == 3:
                moved.data = moved.data.clone()

        graphs.engine.model.register_forward_hook(move)
        return graphs

    steps, _, graphs = trained([], moving)
    assert graphs.captured == 4
    assert steps == ordinary()[0]


def train_with_graphs(overrides: list[str], fails_on_1: int | None) -> int:
    """Train as train.py does, with the backend of these tests. fails_on_1: the capture that fails on rank 1."""
    fails_at = fails_on_1 if ranks().rank == 1 else None
    with mock.patch("depthlm.training.trainer.make_graphs", functools.partial(rerun_graphs, fails_at=fails_at)):
        return train(depthlm.compose(overrides))


def test_a_run_with_graphs_equals_one_without(small_run, tmp_path):
    """Also with sublayer norms, which are measured without a graph, and if it stops, resumes, and skips a batch."""
    settings = ("training.max_steps=9", "training.micro_batch_size=2", "training.log_blocks_every=4",
                "training.log_every=1")  # fmt: skip
    assert train_spoiled(small_run(*settings, name="plain"), {8: "loss"}) == 0
    with mock.patch("depthlm.training.trainer.make_graphs", rerun_graphs):
        for stop in ("training.stop_after=5", "training.stop_after=null"):
            assert train_spoiled(small_run(*settings, stop), {8: "loss"}) == 0
    plain, graphs = tmp_path / "plain", tmp_path / "run"
    assert_same_run(graphs, plain)
    assert (graphs / "blocks.jsonl").read_text() == (plain / "blocks.jsonl").read_text()


@pytest.mark.slow
def test_two_ranks_with_graphs_equal_two_without_also_if_a_capture_fails_on_one(
    two_ranks, train_run, small_run, tmp_path
):
    settings = ("training.max_steps=4", "training.micro_batch_size=2", "deepspeed.reduce_bucket_size=20000")
    plain = train_run(*settings, ranks=2, name="plain")
    for name, fails_on_1 in (("run", None), ("failed", 2)):
        assert two_ranks(train_with_graphs, small_run(*settings, name=name), fails_on_1) == [0, 0]
        assert curve(tmp_path / name) == curve(plain)
        assert_same(weights(tmp_path / name), weights(plain))


def test_a_run_without_graphs_says_why(caplog):
    for overrides, device, reason in (
        (["training.cuda_graphs=auto"], "cpu", None),
        (["training.cuda_graphs=true"], "cpu", "they need a GPU"),
        (["deepspeed=zero1"], "cuda", "deepspeed.stage=1"),
    ):
        config = configuration("size=micro", *overrides)
        engine = mock.Mock(device=torch.device(device))
        caplog.clear()
        with caplog.at_level(logging.INFO, "depthlm"):
            assert make_graphs(config, mock.Mock(), engine) is None
        assert [reason in record.message for record in caplog.records] == ([True] if reason else [])


def test_the_host_waits_once_per_step(monkeypatch):
    """It reads the loss and the norm together; DeepSpeed's timer, which waits before each pass, is off."""
    read: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero"):
        original = getattr(Tensor, name)

        def counted(x: Tensor, *arguments: Any, original: Any = original) -> Any:
            read.append(f"{traceback.extract_stack()[-2]}")
            return original(x, *arguments)

        monkeypatch.setattr(Tensor, name, counted)
    trained([])
    assert len(read) == STEPS, read
