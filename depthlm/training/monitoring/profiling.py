"""A trace of a few steps, for a browser."""

import logging
from pathlib import Path

import torch

log = logging.getLogger("depthlm")

FIRST, LAST = 3, 5  # after the warm-up of allocators and compilers


class Profiler:
    """Records steps FIRST to LAST of this process into profile/trace.json (open it in ui.perfetto.dev)."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "profile" / "trace.json"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.steps_seen = 0
        self.profile: torch.profiler.profile | None = torch.profiler.profile(activities=activities)

    def step(self, last: bool) -> None:
        """A step has ended, maybe the last; the first one seen counts as step 1, also in a resumed run."""
        self.steps_seen += 1
        if self.profile is None:
            return
        if self.steps_seen == FIRST - 1 and not last:
            self.profile.start()
        elif self.steps_seen == LAST:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also of a run that ends before step LAST."""
        if self.profile is None:
            return
        recorded = min(self.steps_seen, LAST) - FIRST + 1
        if recorded > 0:
            self.profile.stop()
            self.path.parent.mkdir(exist_ok=True)
            self.profile.export_chrome_trace(str(self.path))
            log.info("trace of %d steps: %s (open it in ui.perfetto.dev)", recorded, self.path)
        else:
            log.warning("no trace: a profile begins with step %d of a session", FIRST)
        self.profile = None
