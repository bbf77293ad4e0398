"""Weights & Biases tracking in addition to metrics.jsonl. A failure of W&B never stops a run."""

import logging
import netrc
import os
import queue
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from depthlm.config.schema import Tracker as TrackerConfig
from depthlm.run_directory import RunDirectory

log = logging.getLogger("depthlm")

# maximum number of rows queued for W&B; maximum seconds for its start and its end
WAITING, START, FINISH = 10_000, 60.0, 20.0
# seconds within START that wandb.init waits for the server
ANSWER = 20


class Tracker(Protocol):
    """A service that records rows of metrics."""

    id: str | None

    def write(self, row: dict[str, Any]) -> None:
        """Record the metrics of a step."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """Finish at the end of this process, with the summary if the run is complete."""


class NoTracker:
    """No tracking besides metrics.jsonl. Keeps the run id, so that a later start can continue the W&B run."""

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id

    def write(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """Nothing."""


class WandbTracker:
    """A W&B run, called from a separate thread, since any call may hang. Tracking ends after a failure."""

    def __init__(self, run: Any, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.id: str | None = run.id
        self.failed = False
        self.calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self.worker = threading.Thread(target=self._work, name="wandb", daemon=True)
        self.worker.start()

    def write(self, row: dict[str, Any]) -> None:
        """Queue the metrics of a step without blocking. A failure is logged once and not raised."""
        self._call(partial(self.run.log, {name: row[name] for name in row if name != "step"}, step=row["step"]))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Write the summary and wait for W&B to finish, for at most 20 seconds."""
        if not self.failed:
            self._call(partial(self.run.summary.update, summary or {}))
            self._call(self.run.finish)
            with suppress(queue.Full):
                self.calls.put_nowait(None)
            self.worker.join(FINISH)
            if not self.failed and self.worker.is_alive():
                self._fail(f"it did not finish within {FINISH:.0f} s")
        if self.failed:
            give_up()

    def _call(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            self.calls.put_nowait(call)
        except queue.Full:
            self._fail(f"it did not accept the last {WAITING} rows")

    def _work(self) -> None:
        while (call := self.calls.get()) is not None and not self.failed:
            try:
                call()
            except Exception as error:
                self._fail(str(error) or type(error).__name__)

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            log.warning(
                "W&B stopped (%s); metrics.jsonl is still written, and `wandb sync` uploads what is in %s",
                reason, RunDirectory(self.directory).wandb,
            )  # fmt: skip


def start_tracker(
    config: TrackerConfig, directory: Path, name: str, settings: dict[str, Any], run_id: str | None
) -> Tracker:
    """Start or continue the tracker of a run. On failure, log it and fall back to offline, then to no tracker."""
    environment_mode = os.environ.get("WANDB_MODE")
    if config.name == "none" or environment_mode == "disabled":
        return NoTracker(run_id)
    # W&B's own error reports delay the end of the process by half a minute if the server does not answer
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    modes = ["offline"] if config.mode == "offline" else ["online", "offline"]
    if config.mode == "auto" and (environment_mode in ("offline", "dryrun") or not has_key()):
        modes = ["offline"]
    started: queue.Queue[Tracker] = queue.Queue()
    start = partial(_start, modes, started, config, directory, name, settings, run_id)
    threading.Thread(target=start, name="wandb start", daemon=True).start()
    try:
        return started.get(timeout=START)
    except queue.Empty:
        log.warning("W&B did not start within %.0f s; only metrics.jsonl is written", START)
        give_up()
        return NoTracker(run_id)


def _start(
    modes: list[str],
    started: queue.Queue[Tracker],
    config: TrackerConfig,
    directory: Path,
    name: str,
    settings: dict[str, Any],
    run_id: str | None,
) -> None:
    import wandb

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
                settings=wandb.Settings(init_timeout=ANSWER, console="off", silent=True),
            )
            for handler in logging.getLogger("wandb").handlers:
                # on a full disk, W&B's own log would print a traceback for each line
                handler.handleError = lambda record: None  # type: ignore[method-assign]
            where = run.url if mode == "online" else f"offline in {directory / 'wandb'}; `wandb sync` uploads it"
            log.info("W&B run %s: %s", run.id, where)
            return started.put(WandbTracker(run, directory))
        except Exception as error:
            last = mode == modes[-1]
            log.warning("W&B %s failed (%s)%s", mode, error, "; only metrics.jsonl is written" if last else "")
    started.put(NoTracker(run_id))


def give_up() -> None:
    """Detach from the W&B service; otherwise the process would wait for it at exit."""

    def teardown() -> None:
        # SystemExit carries the exit code of the service
        with suppress(Exception, SystemExit):
            import wandb

            wandb.teardown()

    # teardown first unregisters its exit hook, and may then hang, so it runs in a thread
    thread = threading.Thread(target=teardown, name="wandb end", daemon=True)
    thread.start()
    thread.join(1.0)


def has_key() -> bool:
    """Return whether a W&B key is set, in WANDB_API_KEY or in netrc (`wandb login`), without asking the server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
