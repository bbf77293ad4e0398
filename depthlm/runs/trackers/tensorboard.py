"""TensorBoard: event files in the run directory, which `tensorboard --logdir outputs` shows."""

from pathlib import Path
from typing import Any

import yaml


class TensorBoard:
    """Event files of one process."""

    name, advice, upload_seconds = "TensorBoard", "metrics.jsonl is still written", 0.0
    id: str | None = None

    def __init__(self, directory: Path, settings: dict[str, Any], resumed_at: int | None) -> None:
        """settings: the configuration, shown as text. resumed_at: what earlier processes recorded of later steps is
        hidden, since this process trains them again; None hides nothing.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=None if resumed_at is None else resumed_at + 1)
        if resumed_at is not None:
            self.writer.add_text("config", f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```", resumed_at)

    def log(self, row: dict[str, Any]) -> None:
        """Add a scalar for each number of a row."""
        self._scalars("", row, row["step"])

    def alert(self, title: str, text: str, step: int) -> None:
        """Add the alert as text."""
        self.writer.add_text("alerts", f"**{title}**: {text}", step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Add the numbers of the summary, and write everything to the disk."""
        if summary is not None:
            self._scalars("summary/", summary, summary["step" if "step" in summary else "steps"])
        self.writer.close()

    def give_up(self) -> None:
        """Nothing: no process waits."""

    def _scalars(self, prefix: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(f"{prefix}{name}", value, step)
