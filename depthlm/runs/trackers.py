"""Weights & Biases beside metrics.jsonl: online with a key, offline without, and never a reason to stop."""

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

log = logging.getLogger("depthlm")

# rows that may wait for W&B, and seconds that its start and its end may take
WAITING, START, FINISH = 10_000, 60.0, 20.0
# seconds for a server to answer, of those for the start
ANSWER = 20


class Tracker(Protocol):
    """Where rows of metrics go."""

    id: str | None

    def write(self, row: dict[str, Any]) -> None:
        """One logged step."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """The end of this process, with the run's summary if it is complete."""


class NoTracker:
    """metrics.jsonl alone. The id is kept: a later start may reach the run again."""

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id

    def write(self, row: dict[str, Any]) -> None:
        """Nothing."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """Nothing."""


class WandbTracker:
    """One W&B run. It is called from a thread of its own, since any call may hang; after a failure it is left alone."""

    def __init__(self, run: Any, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.id: str | None = run.id
        self.failed = False
        self.calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self.worker = threading.Thread(target=self._work, name="wandb", daemon=True)
        self.worker.start()

    def write(self, row: dict[str, Any]) -> None:
        """One logged step; never waits, and failures are told once, not raised."""
        self._call(partial(self.run.log, {name: row[name] for name in row if name != "step"}, step=row["step"]))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Write the summary and let W&B finish, for 20 seconds at most."""
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
            self._fail(f"it does not take the last {WAITING} rows")

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
                "W&B stopped (%s); metrics.jsonl goes on, and `wandb sync` uploads what is in %s",
                reason, self.directory / "wandb",
            )  # fmt: skip


def start_tracker(
    config: TrackerConfig, directory: Path, name: str, settings: dict[str, Any], run_id: str | None
) -> Tracker:
    """Start or continue the run's tracker; on any failure fall back to offline, then to none, and say so."""
    wished = os.environ.get("WANDB_MODE")
    if config.name == "none" or wished == "disabled":
        return NoTracker(run_id)
    # its reports about itself hold up the end of a process for half a minute where the server does not answer
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    modes = ["offline"] if config.mode == "offline" else ["online", "offline"]
    if config.mode == "auto" and (wished in ("offline", "dryrun") or not has_key()):
        modes = ["offline"]
    started: queue.Queue[Tracker] = queue.Queue()
    start = partial(_start, modes, started, config, directory, name, settings, run_id)
    threading.Thread(target=start, name="wandb start", daemon=True).start()
    try:
        return started.get(timeout=START)
    except queue.Empty:
        log.warning("W&B did not start within %.0f s; metrics.jsonl goes on without it", START)
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
                # on a full disk its own log would print a page of tracebacks for each line
                handler.handleError = lambda record: None  # type: ignore[method-assign]
            where = run.url if mode == "online" else f"offline in {directory / 'wandb'}; `wandb sync` uploads it"
            log.info("W&B run %s: %s", run.id, where)
            return started.put(WandbTracker(run, directory))
        except Exception as error:
            log.warning("W&B %s failed (%s)", mode, error)
    started.put(NoTracker(run_id))


def give_up() -> None:
    """Leave W&B's service to itself: else the process would wait for it at its end."""

    def teardown() -> None:
        # SystemExit: what the service ended with
        with suppress(Exception, SystemExit):
            import wandb

            wandb.teardown()

    # it first takes back that the end of the process waits, and then may hang itself
    thread = threading.Thread(target=teardown, name="wandb end", daemon=True)
    thread.start()
    thread.join(1.0)


def has_key() -> bool:
    """Whether a W&B key is set, by WANDB_API_KEY or by `wandb login` (in netrc); W&B's own check asks its server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
