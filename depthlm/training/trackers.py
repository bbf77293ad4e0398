"""Weights & Biases beside metrics.jsonl: online with a key, offline without, and never a reason to stop."""

import logging
import netrc
import os
import urllib.parse
from pathlib import Path
from typing import Any, Protocol

from depthlm.config.schema import Tracker as TrackerConfig

log = logging.getLogger("depthlm")


class Tracker(Protocol):
    """Where rows of metrics go."""

    id: str | None

    def write(self, row: dict[str, Any]) -> None:
        """One logged step."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """The end of this process, with the run's summary if it is complete."""


class NoTracker:
    """metrics.jsonl alone."""

    id: str | None = None

    def write(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """Nothing."""


class WandbTracker:
    """One W&B run; after a first failure it is left alone, said once."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.id: str | None = run.id

    def write(self, row: dict[str, Any]) -> None:
        """One logged step; failures are told, not raised."""
        if self.run is None:
            return
        try:
            self.run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])
        except Exception as error:
            log.warning("W&B stopped (%s); metrics.jsonl goes on", error)
            self.run = None

    def close(self, summary: dict[str, Any] | None) -> None:
        """Write the summary and let W&B finish."""
        if self.run is None:
            return
        try:
            self.run.summary.update(summary or {})
            self.run.finish()
        except Exception as error:
            log.warning("W&B did not finish (%s); metrics.jsonl is whole", error)


def start_tracker(
    config: TrackerConfig, directory: Path, name: str, settings: dict[str, Any], run_id: str | None
) -> Tracker:
    """Start or continue the run's tracker; on any failure fall back to offline, then to none, and say so."""
    wished = os.environ.get("WANDB_MODE")
    if config.name == "none" or wished == "disabled":
        return NoTracker()
    import wandb

    modes = ["offline"] if config.mode == "offline" else ["online", "offline"]
    if config.mode == "auto" and (wished in ("offline", "dryrun") or not has_key()):
        modes = ["offline"]
    for mode in modes:
        try:
            run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=name,
                id=run_id,
                resume="allow",
                dir=directory,
                mode=mode,  # type: ignore[arg-type]
                config=settings,
                settings=wandb.Settings(init_timeout=20, console="off", silent=True),
            )
            where = run.url if mode == "online" else f"offline in {directory / 'wandb'}; `wandb sync` uploads it"
            log.info("W&B run %s: %s", run.id, where)
            return WandbTracker(run)
        except Exception as error:
            log.warning("W&B %s failed (%s)", mode, error)
    return NoTracker()


def has_key() -> bool:
    """Whether a W&B key is set, by WANDB_API_KEY or by `wandb login` (in netrc); W&B's own check asks its server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
