"""Trackio: a local dashboard (`trackio show`) over a database in the user's cache, or a Hugging Face Space."""

import logging
import sys
from pathlib import Path
from typing import Any

from depthlm.config.schema import Tracker as TrackerConfig

log = logging.getLogger("depthlm")


class Trackio:
    """A Trackio run, named by its directory; a process that resumes the run continues it."""

    name, advice, upload_seconds = "Trackio", "metrics.jsonl is still written", 0.0
    id: str | None = None

    def __init__(
        self, config: TrackerConfig, directory: Path, settings: dict[str, Any], resumed_at: int | None
    ) -> None:
        """resumed_at: the step after which this process trains; 0: it starts a run; None: it does not train."""
        import trackio

        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trackio"]:
            # it prints some lines at the start and the end of a run
            vars(module)["print"] = lambda *_, **__: None
        name = str(directory)
        self.run = trackio.init(
            project=config.project,
            name=name,
            group=config.group or settings["experiment"]["name"] or None,
            space_id=config.space,
            config=settings,
            resume="never" if resumed_at == 0 else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        where = (
            f"in the Space {config.space}" if config.space else f"`trackio show --project {config.project}` shows it"
        )
        log.info("Trackio run %s: %s", name, where)

    def log(self, row: dict[str, Any]) -> None:
        """Log a row at its step."""
        self.run.log({name: row[name] for name in row if name != "step"}, step=row["step"])

    def alert(self, title: str, text: str, step: int) -> None:
        """Add an alert, which the dashboard shows."""
        self.run.alert(title, text, step=step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Log the numbers of the summary, and finish."""
        numbers = {f"summary/{name}": v for name, v in (summary or {}).items() if isinstance(v, int | float)}
        if numbers:
            self.run.log(numbers)
        self.run.finish()

    def give_up(self) -> None:
        """Nothing: no process waits."""
