"""A profiler trace of a few steps, to be viewed in a browser."""

import logging
from pathlib import Path

import torch

from depthlm.run_directory import RunDirectory

log = logging.getLogger("depthlm")

FIRST, LAST = 3, 5  # the first steps warm up allocators and compilers


class Profiler:
    """Records the steps FIRST to LAST of this process in profile/trace.json (open it in ui.perfetto.dev)."""

    def __init__(self, directory: Path) -> None:
        self.path = RunDirectory(directory).trace
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.steps_seen = 0
        self.profile: torch.profiler.profile | None = torch.profiler.profile(activities=activities)

    def step(self, last: bool) -> None:
        """Count a finished step, from 1 in each process, also in a resumed run. last: no step follows."""
        self.steps_seen += 1
        if self.profile is None:
            return
        if self.steps_seen == FIRST - 1 and not last:
            self.profile.start()
        elif self.steps_seen == LAST:
            self.close()

    def close(self) -> None:
        """Write the recorded steps, even if the run ends before step LAST."""
        if self.profile is None:
            return
        recorded = min(self.steps_seen, LAST) - FIRST + 1
        if recorded > 0:
            self.profile.stop()
            self.path.parent.mkdir(exist_ok=True)
            self.profile.export_chrome_trace(str(self.path))
            log.info("trace of %d steps: %s (open it in ui.perfetto.dev)", recorded, self.path)
        else:
            log.warning("no trace: profiling begins at step %d of a process, and this one ran fewer", FIRST)
        self.profile = None
