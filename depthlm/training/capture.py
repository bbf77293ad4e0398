"""Captures a function as a CUDA graph, and finds in its ordinary calls what a graph cannot hold."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import torch
from torch import Tensor

# parts of paths whose frames do not say which line of a model waits or fails
LIBRARIES = {"torch", "deepspeed", "triton", "warnings.py"}
GENERATED = "torchinductor"
# in the warnings of PyTorch's synchronization debug mode
WAITS = "called a synchronizing CUDA operation"


class Captured(NamedTuple):
    """A captured function: what replays it, and its results, which each replay overwrites."""

    replay: Callable[[], None]
    results: Any


class Backend(Protocol):
    """What captures and replays. Tests on a CPU have another one, which runs the function again."""

    def warm_up(self) -> AbstractContextManager[list[str]]:
        """Return a context for the passes before a capture. It yields a list, at its end of the lines that wait."""
        ...

    def capture(self, function: Callable[[], Any]) -> Captured:
        """Capture a function that reads and writes the same tensors in each call. This computes nothing."""
        ...

    def reset(self) -> None:
        """Let later captures take their memory from a new pool, so that the old one is free without its graphs."""
        ...

    def random_state(self) -> Tensor:
        """Return the state of the device's generator."""
        ...


class CudaGraphs:
    """Captures on a stream of its own, as PyTorch requires, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.reset()

    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        """Run on the stream of the capture: autograd adds gradients on the stream of the first backward pass."""
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
        self.pool = torch.cuda.graph_pool_handle()

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)


@contextmanager
def record_waits() -> Iterator[list[str]]:
    """Collect the lines of which PyTorch warns that they wait for the device, once `set_sync_debug_mode` is on."""
    waits: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        warnings.filterwarnings("always", WAITS)
        show = warnings.showwarning

        def record(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if WAITS in str(message):
                waits.append(line_of(traceback.extract_stack()[:-1]))
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = record
        yield waits


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of a stack that is in no library: `file.py:12, in read`."""
    own = [x for x in frames if not LIBRARIES & set(Path(x.filename).parts) and GENERATED not in x.filename]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}"
