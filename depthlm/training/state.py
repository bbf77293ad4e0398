"""The parts of a run, and its progress."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from depthlm.config import Config
from depthlm.distributed.watchdog import Activity
from depthlm.runs.trackers import Tracker
from depthlm.training.checkpoint.saving import Saver
from depthlm.training.engine import Engine
from depthlm.training.monitoring.metrics import MetricsFile
from depthlm.training.plan import Plan


@dataclass
class Progress:
    """The progress of a run: everything that resuming needs besides the engine's state.

    skipped: the steps whose updates were skipped, in order. overflows: the skipped steps that only showed that the
    fp16 loss scale was too large. rewound: [a, b] for each time that the state of step a was restored after step b;
    steps a + 1 to b are in skipped. recent_losses: nats per token of the newest updates, to detect spikes.
    """

    step: int = 0
    tokens: int = 0
    skipped: list[int] = field(default_factory=list)
    overflows: list[int] = field(default_factory=list)
    rewound: list[list[int]] = field(default_factory=list)
    recent_losses: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0
    wandb_id: str | None = None


@dataclass(frozen=True)
class Run:
    """Everything that the training loop uses. parameters: the number of the model's parameters.

    seen: returns for each source of a mixture its share of the samples and its epochs after a number of steps.
    windows: returns for each source its windows in the global batch of a step (counted from 1).
    rewind_to: loads the checkpoint of a step into the engine and returns its progress, or None if that fails.
        Collective.
    bad_batches, blocks: the files of bad batches and of sublayer norms, in the format of metrics.jsonl.
    """

    config: Config
    plan: Plan
    directory: Path
    engine: Engine
    device: torch.device
    batches: Iterator[torch.Tensor]
    seen: Callable[[int], dict[str, tuple[float, float]]] | None
    windows: Callable[[int], dict[str, list[int]]]
    rewind_to: Callable[[int], Progress | None]
    validate: Callable[[], dict[str, float | None]]
    diagnose: Callable[[], dict[str, float | None]]
    parameters: int
    flops_per_token: float
    peak_flops: float | None
    metrics: MetricsFile
    bad_batches: MetricsFile
    blocks: MetricsFile
    tracker: Tracker
    watch: Activity
    saver: Saver
