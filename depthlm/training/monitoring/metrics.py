"""Measurements of a run: metrics.jsonl, sublayer norms, the routing of experts, times, memory, and a profiler trace.

Shapes: l layers with experts, each loop again; e experts.
"""

import json
import logging
import mmap
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthlm.files import open_appending, open_regular
from depthlm.machine.memory import peak_process_bytes
from depthlm.model import Decoder, Observer, SublayerSpec
from depthlm.model.experts import Routing, balance
from depthlm.run_directory import RunDirectory
from depthlm.runs.records import finite, row_of

log = logging.getLogger("depthlm")
FIRST_PROFILED, LAST_PROFILED = 3, 5


def peak_memory_gib(device: torch.device) -> float:
    """Return the largest peak memory of all ranks so far: of a GPU's allocator, or of a process; collective."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_process_bytes()
    peak_gib = torch.tensor(peak / 2**30, device=device)
    torch.distributed.all_reduce(peak_gib, torch.distributed.ReduceOp.MAX)
    return peak_gib.item()


class MetricsFile:
    """A JSON Lines file such as metrics.jsonl, one object per row, flushed after every row. path None: writes nothing.

    A row that cannot be written, for example on a full disk, is kept in memory and written with the next row.
    size: the bytes of the rows in the file. newest: the position at which the newest of them begins.
    """

    def __init__(self, path: Path | None, after_step: int, saved: dict[str, Any] | None = None) -> None:
        """Open for appending; rows of steps after `after_step`, and a truncated last row, are removed.

        saved: the last row, as a checkpoint has it; it is appended if the file has lost it.
        """
        self.path = path
        self.last: dict[str, Any] = {}
        self.waiting: list[str] = []
        self.size = self.newest = 0
        self.failing = False
        if path is not None:
            path.touch()
            self.last = cut_after(path, after_step)
            self.size = path.stat().st_size
            self.newest = self.size - len(_line(self.last))
            if saved and saved["step"] > self.last.get("step", 0):
                self.write(saved)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        self.last = row
        if self.path is not None:
            self.waiting.append(_line(row))
            self._flush(self.path)

    def amend(self, values: dict[str, Any]) -> None:
        """Add values to the newest row."""
        if self.waiting:
            self.waiting.pop()
        else:
            self.size = self.newest
        self.write({**self.last, **values})

    def _flush(self, path: Path) -> None:
        text = "".join(self.waiting)
        try:
            with open_appending(path) as file:
                if file.tell() > self.size:
                    file.truncate(self.size)
                file.write(text)
        except OSError as error:
            if not self.failing:
                log.warning("%s cannot be written (%s); its rows are kept in memory", path, error)
            self.failing = True
            return
        self.failing = False
        self.newest, self.size = self.size + len(text) - len(self.waiting[-1]), self.size + len(text)
        self.waiting.clear()


def cut_after(path: Path, step: int) -> dict[str, Any]:
    """Truncate a file after its last complete row of at most this step, and return that row; {} if there is none.

    The file is read from the end, so that a run of a million steps resumes as fast as one of ten.
    """
    if path.stat().st_size == 0:
        return {}
    last: dict[str, Any] = {}
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as rows:
        end = len(rows)
        while end > 0 and not last:
            start = rows.rfind(b"\n", 0, end - 1) + 1
            line = rows[start:end]
            row = row_of(line) if line.endswith(b"\n") else None
            if row is not None and row["step"] <= step:
                last = row
            else:
                end = start
    os.truncate(path, end)
    return last


class Stopwatch:
    """Seconds spent in training steps; paused during validation and saving."""

    def __init__(self, seconds_before: float = 0.0) -> None:
        self.total = seconds_before
        self.lap = 0.0
        self.started: float | None = None

    def start(self) -> None:
        """Start or continue."""
        self.started = time.perf_counter()

    def pause(self) -> None:
        """Pause, and add the elapsed time to the lap and the total."""
        if self.started is not None:
            elapsed = time.perf_counter() - self.started
            self.total += elapsed
            self.lap += elapsed
            self.started = None

    def take_lap(self) -> float:
        """Return the seconds of the current lap without pauses, and begin a new lap."""
        running = self.started is not None
        self.pause()
        seconds, self.lap = self.lap, 0.0
        if running:
            self.start()
        return seconds


def start_profiler(directory: Path) -> torch.profiler.profile:
    """Return a profiler whose `step` is to be called after each step of this process, and `stop` in the end.

    It records steps 3 to 5, or fewer if the run ends there, in profile/trace.json, which ui.perfetto.dev shows.
    """
    path = RunDirectory(directory).trace

    def write(profiler: torch.profiler.profile) -> None:
        if profiler.step_num < FIRST_PROFILED:
            return
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        recorded, shown = profiler.step_num - FIRST_PROFILED + 1, path.relative_to(directory)
        log.info("trace of %d steps: %s (open it in ui.perfetto.dev)", recorded, shown)

    # the first steps warm up allocators and compilers, and one more the profiler
    active = LAST_PROFILED - FIRST_PROFILED + 1
    schedule = torch.profiler.schedule(skip_first=FIRST_PROFILED - 2, wait=0, warmup=1, active=active, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write)
    profiler.start()
    return profiler


class SublayerNormMeter(Observer):
    """Measures one step: root mean squares over all micro-batches and ranks (Attention Residuals, Figure 5 b and c).

    The host does not synchronize with the device before `row`. depth: the number of layers times loops.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        # [output and gradient, attention and MLP, layer]
        self.squares = torch.zeros(2, 2, depth, device=device)
        self.counts = torch.zeros(2, depth, device=device)

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        if not output_btd.requires_grad:
            return
        output = mean_square(output_btd.detach())

        # activation checkpointing computes an output twice; the hook counts only the one with a backward pass
        def accumulate(gradient_btd: Tensor) -> None:
            self.squares[:, int(spec.kind == "mlp"), spec.layer] += torch.stack((output, mean_square(gradient_btd)))
            self.counts[int(spec.kind == "mlp"), spec.layer] += 1

        output_btd.register_hook(accumulate)

    def row(self, loss_scale: float) -> dict[str, list[float | None]]:
        """Return for each layer the RMS of the attention and MLP outputs as written to the residual stream, and the RMS
        of the gradient of the loss (the mean over the tokens of the global batch) there; collective.

        loss_scale: the fp16 loss scale of the step. Non-finite values are None.
        """
        ranks = torch.distributed.get_world_size()
        sums = torch.cat((self.squares, self.counts[None]))
        torch.distributed.all_reduce(sums)
        rms = (sums[:2] / sums[2]).sqrt()
        # the loss was multiplied by the number of ranks, since DeepSpeed averages gradients over the ranks afterwards
        rms[1] /= loss_scale * ranks
        return {
            f"{sublayer}_{quantity}": [finite(value) for value in rms[i, j].tolist()]
            for i, quantity in enumerate(("output", "gradient"))
            for j, sublayer in enumerate(("attention", "mlp"))
        }


def mean_square(x: Tensor) -> Tensor:
    """Return the mean of the squares of all elements, in fp32."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).square() / x.numel()


class RoutingMeter:
    """Adds up the routing of the micro-batches of a step, and balances the experts after it."""

    def __init__(self, model: Decoder, device: torch.device, file: MetricsFile) -> None:
        """file: gets a row for each logged step."""
        self.mixtures, self.file = model.mixtures(), file
        layers, experts = model.loops * len(self.mixtures), model.size.num_experts
        # a row is the load of each expert, then balance, z and entropy
        self._sums = torch.zeros(layers, experts + 3, device=device)
        self._batches = 0

    def begin(self) -> None:
        """Forget the last step."""
        self._sums.zero_()
        self._batches = 0

    def add(self, routing: Routing) -> None:
        """Add the routing of a micro-batch of this rank."""
        others = torch.stack((routing.balance, routing.z, routing.entropy), 1)
        self._sums += torch.cat((routing.load_e, others), 1).detach()
        self._batches += 1

    def end(self, applied: bool) -> None:
        """Add the sums of all ranks and, if the update was applied, change the biases of the routers; collective."""
        torch.distributed.all_reduce(self._sums)
        self._sums[:, -3:] /= self._batches * torch.distributed.get_world_size()
        if applied:
            balance(self.mixtures, self._sums[:, :-3])

    def metrics(self) -> dict[str, float | None]:
        """Return the means over the layers, and the largest load of an expert, as a multiple of the mean load."""
        load_le, means = self._sums[:, :-3], self._sums[:, -3:].mean(0).tolist()
        largest = (load_le / load_le.mean(1, keepdim=True)).max().item()
        names = ("router/largest_load", "router/balance_loss", "router/z", "router/entropy")
        return {name: finite(value) for name, value in zip(names, (largest, *means), strict=True)}

    def write(self, step: int) -> None:
        """Write the share of each expert in the load, the entropy and the biases, layer by layer."""
        load_le = self._sums[:, :-3]
        biases = [mixture.router.bias_e for mixture in self.mixtures]
        row = {
            "step": step,
            "load": [[*map(finite, load_e)] for load_e in (load_le / load_le.sum(1, keepdim=True)).tolist()],
            "entropy": [*map(finite, self._sums[:, -1].tolist())],
            "bias": [[*map(finite, bias_e.tolist())] for bias_e in biases if bias_e is not None],
        }
        self.file.write(row)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"
