"""Weights & Biases and TensorBoard, which record a run beside metrics.jsonl. A failure of one never stops a run.

Each is called from a thread of its own, since any of its calls may hang.
"""

import logging
import netrc
import os
import queue
import secrets
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from depthlm.config.schema import Tracker as TrackerConfig
from depthlm.run_directory import RunDirectory

log = logging.getLogger("depthlm")
# maximum number of calls that wait for a service; maximum seconds for its start and its end
WAITING, START, FINISH = 10_000, 60.0, 20.0
# seconds within START that wandb.init waits for the server
ANSWER = 20
# the groups whose options are the tags of every W&B run
TAGS = ("model", "size", "data")


class TensorBoard:
    """Event files of one process."""

    name, advice = "TensorBoard", "metrics.jsonl is still written"
    id: str | None = None

    def __init__(self, directory: Path, settings: dict[str, Any], resumed_at: int) -> None:
        """settings: the configuration, shown as text. resumed_at: what earlier processes recorded of later steps is
        hidden, since this process trains them again.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=resumed_at + 1)
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
        """Do nothing: the process does not wait for event files at exit."""

    def _scalars(self, prefix: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(f"{prefix}{name}", value, step)


class WeightsAndBiases:
    """A W&B run."""

    name = "W&B"

    def __init__(self, run: Any, directory: Path) -> None:
        self.run = run
        self.id: str | None = run.id
        folder = RunDirectory(directory).wandb
        self.advice = f"metrics.jsonl is still written, and `wandb sync` uploads what is in {folder}"

    def log(self, row: dict[str, Any]) -> None:
        """Log a row at its step."""
        self.run.log({name: row[name] for name in row if name != "step"}, step=row["step"])

    def alert(self, title: str, text: str, step: int) -> None:
        """Send an alert, which W&B passes on by e-mail or Slack as the user has set there."""
        self.run.alert(title=title, text=f"step {step}: {text}", level="WARN", wait_duration=300)

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Record the summary of a complete run, and finish."""
        self.run.summary.update(summary or {})
        self.run.finish()

    def give_up(self) -> None:
        """Detach from the W&B service, so that the process does not wait for it at exit."""
        leave_wandb()


# a running service, any of whose methods may raise anything, or hang. name: for log lines. advice: where the run is
# still recorded when the service fails, as a clause. id: by which a later process continues the run in the service;
# None if it needs none
Service = TensorBoard | WeightsAndBiases


class QueuedService:
    """A service whose thread makes the calls from a queue, so that training never waits. The first failure ends it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.failed = False
        self.calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self.worker = threading.Thread(target=self._work, name=service.name, daemon=True)
        self.worker.start()

    def write(self, row: dict[str, Any]) -> None:
        """Queue a row without blocking. A failure is logged once and not raised."""
        self._call(partial(self.service.log, row))

    def alert(self, title: str, text: str, step: int) -> None:
        """Queue an alert without blocking."""
        self._call(partial(self.service.alert, title, text, step))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Pass on the summary, and wait until the service has finished, for a limited time."""
        if not self.failed:
            self._call(partial(self.service.finish, summary))
            with suppress(queue.Full):
                self.calls.put_nowait(None)
            self.worker.join(FINISH)
            if not self.failed and self.worker.is_alive():
                self._fail(f"it did not finish within {FINISH:.0f} s")
        if self.failed:
            self.service.give_up()

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
            log.warning("%s stopped (%s); %s", self.service.name, reason, self.service.advice)


class Trackers:
    """The services of a run, if any. id: of its W&B run, which a later process continues."""

    def __init__(self, services: list[QueuedService], wandb_id: str | None = None) -> None:
        self.services = services
        self.id = next((queued.service.id for queued in services if queued.service.id is not None), wandb_id)

    def write(self, row: dict[str, Any]) -> None:
        """Record the metrics of a step, without blocking."""
        for service in self.services:
            service.write(row)

    def alert(self, title: str, text: str, step: int) -> None:
        """Notify the user of an event at a step, without blocking."""
        for service in self.services:
            service.alert(title, text, step)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Finish at the end of this process, with the summary if the run is complete."""
        for service in self.services:
            service.close(summary)


def start_trackers(
    config: TrackerConfig,
    directory: Path,
    settings: dict[str, Any],
    wandb_id: str | None,
    resumed_at: int,
) -> Trackers:
    """Start or continue the services of the run in a directory. One that fails is logged and not used.

    settings: the whole configuration, as nested dictionaries. resumed_at: the step after which this process trains.
    """
    run, services = RunDirectory(directory), []
    if config.wandb and os.environ.get("WANDB_MODE") != "disabled":
        start = partial(start_wandb, config, directory, settings, wandb_id)
        services.append(start_service("W&B", start, leave_wandb))
    if config.tensorboard:
        start_writer = partial(TensorBoard, run.tensorboard, settings, resumed_at)
        services.append(start_service("TensorBoard", start_writer, lambda: None))
    return Trackers([service for service in services if service is not None], wandb_id)


def start_service(name: str, start: Callable[[], Service | None], give_up: Callable[[], None]) -> QueuedService | None:
    """Start a service within START seconds; None, after a warning, if it fails or hangs.

    start: returns None if it has logged itself why it failed. give_up: called if it hangs.
    """
    results: queue.Queue[Service | None] = queue.Queue()

    def attempt() -> None:
        try:
            results.put(start())
        except Exception as error:
            log.warning("%s failed to start (%s); metrics.jsonl is still written", name, error)
            results.put(None)

    threading.Thread(target=attempt, name=f"{name} start", daemon=True).start()
    try:
        service = results.get(timeout=START)
    except queue.Empty:
        log.warning("%s did not start within %.0f s; metrics.jsonl is still written", name, START)
        give_up()
        return None
    return None if service is None else QueuedService(service)


def start_wandb(
    config: TrackerConfig, directory: Path, settings: dict[str, Any], run_id: str | None
) -> WeightsAndBiases | None:
    """Start or continue the W&B run of a directory: online if there is an API key and a server, otherwise offline.

    Returns None, after a warning, if neither works.
    """
    import wandb

    # W&B's own error reports delay the end of the process by half a minute if the server does not answer
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    for mode in (chosen := modes(config)):
        try:
            run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group or settings["experiment"]["name"] or None,
                # W&B refuses other tags
                tags=[*dict.fromkeys(t[:64] for t in (*(settings[g]["name"] for g in TAGS), *config.tags) if t)],
                name=directory.name,
                # WANDB_RUN_ID would be that of every run of a shell or a sweep, which the server would take for one run
                id=run_id or secrets.token_hex(4),
                # W&B's service resolves a relative path against the working directory it was started in
                dir=directory.absolute(),
                config=settings,
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                settings=wandb.Settings(init_timeout=ANSWER, console="off", silent=True),
            )
            for handler in logging.getLogger("wandb").handlers:
                # on a full disk, W&B's own log would print a traceback for each line
                handler.handleError = lambda record: None  # type: ignore[method-assign]
            where = run.url if mode == "online" else "offline in the folder wandb/; `wandb sync` uploads it"
            log.info("W&B run %s: %s", run.id, where)
            return WeightsAndBiases(run, directory)
        except Exception as error:
            last = mode == chosen[-1]
            log.warning("W&B %s failed (%s)%s", mode, error, "; metrics.jsonl is still written" if last else "")
    return None


def modes(config: TrackerConfig) -> list[str]:
    """Return the modes to try, in order."""
    environment_mode = os.environ.get("WANDB_MODE")
    offline = environment_mode in ("offline", "dryrun") or not has_key()
    if config.mode == "offline" or (config.mode == "auto" and offline):
        return ["offline"]
    return ["online", "offline"]


def leave_wandb() -> None:
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
