"""Micro-batches and a training step on fake tensors. Import this after `benchmarks.rehearsal.prepare`."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_gpu import launches
from benchmarks.fake_gpu.step import LaunchCounter, model_of
from depthlm.config import compose
from depthlm.distributed.launchers import ranks
from depthlm.model import Decoder, Loss, Observer
from depthlm.optimizers.build import build_optimizer
from depthlm.training.engine.reduction import StepGuard
from depthlm.training.graphs import MicroBatchGraphs
from depthlm.training.plan import make_plan
from depthlm.training.step import train_step


def passes_of(overrides: list[str]) -> list[LaunchCounter]:
    """Return what three micro-batches count that a CUDA graph would capture.

    The first writes the gradients, the others add to them. Raises: RuntimeError where the host needs a shape that
    depends on values.
    """
    config = compose(overrides, here=False)
    model, counters = model_of(config), [LaunchCounter() for _ in range(3)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
        graphs = MicroBatchGraphs(FakeEngine(model), 0.1, 1.0, mock.Mock())  # type: ignore[arg-type]
        graphs.max_documents = 8
        tokens = torch.zeros(2, config.training.sequence_length + 1, dtype=torch.long, device="cuda")
        for counter in counters:
            launches.record_launches(counter.launched)
            # a stream of its own would have memory of its own
            with counter, mock.patch("torch.cuda.Stream", side_effect=RuntimeError("another stream")):
                graphs._passes([tokens, tokens[:, 0].int()])
    return counters


def waits_of_step(overrides: list[str]) -> Counter[str]:
    """Return where the host waits in a training step at ZeRO 0, and how many numbers it reads there.

    The step has the micro-batches and the update of a run, without DeepSpeed around them.
    """
    config = compose(overrides, here=False)
    model, counter, plan = model_of(config), LaunchCounter(), make_plan(config, ranks())

    with FakeTensorMode(allow_non_fake_inputs=True):
        model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
        engine = FakeEngine(model, StepGuard(build_optimizer(model, config.optimizer), 1.0))
        shape = plan.accumulation, plan.micro_batch_size, plan.sequence_length + 1
        batch = torch.zeros(*shape, dtype=torch.long, device="cuda")
        launches.record_launches(counter.launched)
        alone = mock.patch.multiple("torch.distributed", all_reduce=mock.Mock(), get_world_size=lambda: 1)
        with counter, alone:
            train_step(engine, batch, plan, config.training.z_loss)
    return counter.synchronizations


class FakeEngine:
    """What training calls of an engine, with bf16 under autocast, as at ZeRO 0. guard: updates; None: nothing does."""

    run_batch = None

    def __init__(self, model: Decoder, guard: StepGuard | None = None) -> None:
        self.model, self.guard = model, guard

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, observer: Observer, seeds_b: torch.Tensor) -> Loss:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.model(inputs, targets, observer=observer, seeds_b=seeds_b)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, nll: torch.Tensor | None, skip: torch.Tensor | None) -> float:
        if nll is not None and self.guard is not None:
            self.guard.nll, self.guard.skip = nll, skip
            self.guard.step()
            return self.guard.read_nll
        return 0.0

    def skip_reduction(self) -> AbstractContextManager[None]:
        return nullcontext()
