"""What a run is made of, and how far it is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthlm.config import Config
from depthlm.distributed.watchdog import Activity
from depthlm.runs.trackers import Tracker
from depthlm.training.checkpoint.saving import Saver
from depthlm.training.monitoring.metrics import MetricsFile
from depthlm.training.plan import Plan


@dataclass
class Progress:
    """How far a run is: all that resuming needs besides the engine's state.

    skipped: the steps whose batches made no update, in order. overflows: those among them that only showed that the
    loss scale of fp16 was too large. rewound: [a, b] for each time that the state of step a came back after step b;
    a + 1 to b are in skipped. recent_losses: nats per token of the newest updates, of which a spike stands out.
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
    """What the loop works with. parameters: how many the model has.

    seen: of each source of a mixture after so many steps, its share of the samples and its epochs.
    windows: of each source, its windows in the whole batch of a step (from 1).
    rewind_to: loads the checkpoint of a step into the engine and returns its progress; None where that fails.
        Collective.
    bad_batches, blocks: files as that of the metrics, for what is told of bad batches and measured of blocks.
    """

    config: Config
    plan: Plan
    directory: Path
    engine: Any
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
