"""Trackio: a local dashboard (`trackio show`) over a database in the user's cache, or a Hugging Face Space."""

import io
import logging
from contextlib import redirect_stdout
from typing import Any

from depthlm.config.schema import Tracker as TrackerConfig

log = logging.getLogger("depthlm")


class Trackio:
    """A Trackio run; a later process of the same run continues it."""

    name, advice, finish_seconds = "Trackio", "metrics.jsonl is still written", 20.0
    id: str | None = None

    def __init__(self, config: TrackerConfig, name: str, settings: dict[str, Any]) -> None:
        import trackio

        # it prints six lines, and the thread that logs waits for its start
        with redirect_stdout(io.StringIO()):
            self.run = trackio.init(
                project=config.project,
                name=name,
                group=config.group or settings["experiment"]["name"] or None,
                space_id=config.space,
                config=settings,
                resume="allow",
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
        with redirect_stdout(io.StringIO()):
            self.run.alert(title, text, step=step)

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Log the numbers of the summary, and finish."""
        numbers = {f"summary/{name}": v for name, v in (summary or {}).items() if isinstance(v, int | float)}
        if numbers:
            self.run.log(numbers)
        with redirect_stdout(io.StringIO()):
            self.run.finish()

    def give_up(self) -> None:
        """Nothing: no process waits."""
