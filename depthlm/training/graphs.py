"""CUDA graphs: the passes of a micro-batch are captured once, and one launch replays them in every later step.

Without a graph, the host issues thousands of kernels per micro-batch, which takes longer than the GPU needs to run
those of a depth mechanism. A graph has all of them, with the addresses of what they read and write. So a micro-batch is
copied to static inputs, and gradients have static addresses: the first micro-batch of a step writes them, the others
add to them, by a graph of their own. All graphs take their memory from one pool.

A replay runs no Python. What differs between steps is a tensor that the graph reads, or happens outside of it: the sum
over micro-batches and ranks, the choice to skip an update, clipping, and the update itself. With several ranks, the
buckets of gradients are reduced after the last replay: in a graph, NCCL would need all ranks to capture, and a rank
whose capture fails must still meet the others.
"""

import gc
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthlm.config import Config
from depthlm.data.sampler import inputs_and_targets
from depthlm.model.experts import Routing
from depthlm.model.layer import UNOBSERVED, Observer
from depthlm.training.engine import Engine
from depthlm.training.engine.replace import replace_attributes
from depthlm.training.plan import Plan

log = logging.getLogger("depthlm")

# steps without a graph, in which kernels are compiled and libraries allocate their memory
EAGER_STEPS = 2
# parts of paths whose frames do not say which line of a model waits or fails
LIBRARIES = {"torch", "deepspeed", "triton", "warnings.py"}
GENERATED = "torchinductor"
# in the warnings of PyTorch's synchronization debug mode
WAITS = "called a synchronizing CUDA operation"


class Captured(NamedTuple):
    """A captured function: what replays it, and its results, which each replay overwrites."""

    replay: Callable[[], None]
    results: Any


class CudaGraphs:
    """Captures on a stream of its own, as PyTorch requires, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.reset()

    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        """Return a context for the passes before a capture. It yields a list, at its end of the lines that wait.

        They run on the stream of the capture: autograd adds gradients on the stream of the first backward pass.
        """
        mode = torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(torch.cuda.current_stream())
        with record_waits() as waits, torch.cuda.stream(self.stream):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, function: Callable[[], Any]) -> Captured:
        """Capture a function that reads and writes the same tensors in each call. This computes nothing."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # other threads, such as the one that pins the memory of batches, may call CUDA meanwhile
        settings: dict[str, Any] = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        failure: BaseException | None = None
        try:
            with torch.cuda.graph(graph, **settings):
                try:
                    results = function()
                except BaseException as error:
                    failure = error
                    raise
        except RuntimeError as error:
            if failure is None or error is failure:
                raise
            # the end of the capture has failed too, which hides the cause, and leaves its stream and its pool in use
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self.pool)
            raise failure from None
        finally:
            # with its traceback it would keep the memory of the capture
            failure = None
        return Captured(graph.replay, results)

    def reset(self) -> None:
        """Let later captures take their memory from a new pool, so that the old one is free without its graphs."""
        self.pool = torch.cuda.graph_pool_handle()

    def random_state(self) -> Tensor:
        """Return the state of the device's generator."""
        return torch.cuda.get_rng_state(self.device)


@contextmanager
def record_waits() -> Iterator[list[str]]:
    """Collect the lines of which PyTorch warns that they wait for the device, once `set_sync_debug_mode` is on."""
    waits: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        warnings.filterwarnings("always", WAITS)
        show = warnings.showwarning

        def record(message: Warning | str, *place: Any, **named: Any) -> None:
            if WAITS in str(message):
                waits.append(line_of(traceback.extract_stack()[:-1]))
            else:
                show(message, *place, **named)

        warnings.showwarning = record
        yield waits


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of a stack that is in no library: `file.py:12, in read`."""
    own = [x for x in frames if not LIBRARIES & set(Path(x.filename).parts) and GENERATED not in x.filename]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}"


class Passes(NamedTuple):
    """The results of a micro-batch. sums: [nll, loss], summed over tokens. routing: of the experts."""

    sums: Tensor
    routing: Routing | None


class MicroBatchGraphs:
    """Runs the passes of a micro-batch as graphs, after two steps without. A capture that fails loses nothing.

    captured: the number of captures. reason: why one has failed; all later steps run without graphs.
    """

    def __init__(self, engine: Engine, z_loss: float, factor: float, backend: CudaGraphs) -> None:
        """z_loss: its weight. factor: of the loss. backend: `CudaGraphs`, or what tests on a CPU have in its place."""
        self.engine, self.z_loss, self.factor, self.backend = engine, z_loss, factor, backend
        self.parameters: list[nn.Parameter] = [p for p in engine.model.parameters() if p.requires_grad]
        self.steps, self.captured = 0, 0
        self.reason: str | None = None
        self.max_documents: int | None = None
        self.release()

    def release(self) -> None:
        """Free the graphs with their memory; the next step captures again. Gradients must not be in use."""
        self.backend.reset()
        self.graphs: dict[bool, Captured] = {}
        self.inputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.addresses = self._addresses()

    def make_room(self, batch: Tensor) -> None:
        """Let a micro-batch have as many documents as in a batch [accumulation, micro_batch, T + 1] on the host.

        A graph has a static number of documents, a power of two, since each change needs another capture.
        """
        model = self.engine.model
        if model.end_of_text is None or self.reason is not None:
            return
        ends = (batch == model.end_of_text) | (batch == ~model.end_of_text)
        needed = int(ends.sum((1, 2)).max()) + batch.shape[1]
        if self.max_documents is None or needed > self.max_documents:
            self.max_documents = 1 << (max(needed, 4 * batch.shape[1]) - 1).bit_length()
            self.release()

    def begin_step(self) -> bool:
        """Begin a step. Return whether `run` runs its micro-batches; it does not after a capture has failed."""
        if self.reason is not None:
            return False
        self.steps += 1
        if self.addresses != self._addresses():
            self.release()
        return True

    def run(self, tokens: Tensor, seeds_b: Tensor | None, is_first: bool) -> Passes:
        """Add the gradients of a micro-batch [micro_batch, T + 1], which are not reduced over ranks.

        seeds_b: of dropout. is_first: whether it is the first of a step. The results are valid until the next call.
        """
        inputs = [tokens] if seeds_b is None else [tokens, seeds_b]
        if self.reason is None and self.steps <= EAGER_STEPS:
            return self._warm_up(inputs)
        if self.reason is None and is_first not in self.graphs:
            self._capture(inputs, is_first)
        if self.reason is not None:
            return self._passes(inputs)
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new, non_blocking=True)
        self.graphs[is_first].replay()
        self._attach(self.gradients)
        return self.graphs[is_first].results

    def _warm_up(self, inputs: Sequence[Tensor]) -> Passes:
        """Run the passes without a graph. What a graph cannot hold is found here, since a failed capture costs memory.

        A recomputation draws the numbers of its first pass again, whose state a capture cannot read. The first step
        may wait, where kernels are compiled.
        """
        state = self.backend.random_state()
        with self.backend.warm_up() as waits:
            results = self._passes(inputs)
        if self.engine.model.activation_checkpointing and not torch.equal(state, self.backend.random_state()):
            self.fail("a layer that is recomputed draws random numbers")
        elif waits and self.steps == EAGER_STEPS:
            self.fail(f"the host waits for the GPU at {waits[0]}")
        return results

    def _capture(self, inputs: Sequence[Tensor], is_first: bool) -> None:
        self.inputs = self.inputs or [x.clone() for x in inputs]
        try:
            self.graphs[is_first] = self.backend.capture(partial(self._passes, self.inputs))
        except Exception as error:
            message = (str(error) or type(error).__name__).splitlines()[0]
            self.fail(f"a capture failed at {line_of(traceback.extract_tb(error.__traceback__))}: {message}")
        if self.reason is not None:
            # the capture has computed nothing
            self._attach(None if is_first else self.gradients)
            self.graphs, self.inputs, self.gradients = {}, [], []
            gc.collect()
            if self.engine.device.type == "cuda":
                torch.cuda.empty_cache()
            return
        self.captured += 1
        if is_first:
            self.gradients = [p.grad for p in self.parameters]

    def fail(self, reason: str) -> None:
        """Train without graphs from now on."""
        self.reason = reason
        log.warning("the run continues without CUDA graphs: %s", reason)

    def _passes(self, inputs: Sequence[Tensor]) -> Passes:
        # batches of validation may have more documents
        with self.engine.skip_reduction(), replace_attributes(self.engine.model, max_documents=self.max_documents):
            passes, loss = run_forward(self.engine, inputs[0], (*inputs, None)[1], self.z_loss)
            self.engine.backward(loss * self.factor)
        return passes

    def _attach(self, gradients: Sequence[Tensor | None] | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients or repeat(None), strict=False):
            parameter.grad = gradient

    def _addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.parameters]


def run_forward(
    engine: Engine, tokens: Tensor, seeds_b: Tensor | None, z_loss: float, observer: Observer = UNOBSERVED
) -> tuple[Passes, Tensor]:
    """Run the forward pass of a micro-batch [micro_batch, T + 1]. Return its results and the summed loss."""
    inputs, targets = inputs_and_targets(tokens)
    results = engine(inputs, targets, observer, seeds_b)
    loss, routing = results.total(z_loss), results.routing
    if routing is not None:
        routing = Routing(*(x.detach() for x in routing))
    return Passes(torch.stack((results.nll.detach(), loss.detach())), routing), loss


def make_graphs(config: Config, plan: Plan, engine: Engine) -> MicroBatchGraphs | None:
    """Return the graphs of a run as training.cuda_graphs says, or None. Logs why a run cannot have them."""
    choice, device = config.training.cuda_graphs, engine.device
    if choice is False or (choice == "auto" and device.type != "cuda"):
        return None
    if reason := why_not(config, device):
        log.info("training.cuda_graphs=%s: the run trains without CUDA graphs: %s", str(choice).lower(), reason)
        return None
    return MicroBatchGraphs(engine, config.training.z_loss, plan.loss_factor, CudaGraphs(device))


def why_not(config: Config, device: torch.device) -> str | None:
    """Return why the settings of a run exclude graphs, or None. `MicroBatchGraphs` finds what its code excludes."""
    if device.type != "cuda":
        return f"they need a GPU, and the device is {device.type}"
    if config.deepspeed.stage > 0:
        return f"deepspeed.stage={config.deepspeed.stage} moves gradients or weights while a micro-batch runs"
    if config.training.pipeline.stages > 1:
        return f"training.pipeline.stages={config.training.pipeline.stages}: micro-batches wait for other ranks"
    if config.deepspeed.experts > 1:
        return f"deepspeed.experts={config.deepspeed.experts}: how many tokens a rank gets is known when they are sent"
    if config.training.profile:
        return "training.profile=true shows the operators of a step"
    return None
