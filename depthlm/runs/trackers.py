"""Services that record a run in addition to metrics.jsonl. A failure of a service never stops a run.

Each service is called from a thread of its own, since any of its calls may hang.
"""

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from depthlm.config.schema import Tracker as TrackerConfig
from depthlm.run_directory import RunDirectory
from depthlm.runs import weights_and_biases

log = logging.getLogger("depthlm")
# maximum number of calls that wait for a service; maximum seconds for its start and its end
WAITING, START, FINISH = 10_000, 60.0, 20.0


class Service(Protocol):
    """A running service. Each method may raise anything, or hang.

    name: for log lines. advice: where the run is still recorded when the service fails, as a clause. id: by which a
    later process continues the run in the service; None if it needs none. upload_seconds: how much longer the end of a
    complete run may take.
    """

    name: str
    advice: str
    id: str | None
    upload_seconds: float

    def log(self, row: dict[str, Any]) -> None:
        """Record a row of metrics.jsonl."""

    def alert(self, title: str, text: str, step: int) -> None:
        """Notify the user of an event at a step."""

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Record the summary of a complete run, and end."""

    def give_up(self) -> None:
        """Detach from the service after a failure, so that the process does not wait for it at exit."""


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
        seconds = FINISH + (self.service.upload_seconds if summary is not None else 0.0)
        if not self.failed:
            self._call(partial(self.service.finish, summary))
            with suppress(queue.Full):
                self.calls.put_nowait(None)
            self.worker.join(seconds)
            if not self.failed and self.worker.is_alive():
                self._fail(f"it did not finish within {seconds:.0f} s")
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
    *,
    resumed_at: int | None = None,
) -> Trackers:
    """Start or continue the services of the run in a directory. One that fails is logged and not used.

    settings: the whole configuration, as nested dictionaries. resumed_at: the step after which this process trains;
    0: it starts the run; None: it does not train.
    """
    run, services = RunDirectory(directory), []
    if config.wandb and os.environ.get("WANDB_MODE") != "disabled":
        start = partial(weights_and_biases.start, config, directory, settings, wandb_id, resumed_at)
        services.append(start_service("W&B", start, weights_and_biases.give_up))
    if config.tensorboard:
        start_writer = partial(TensorBoard, run.tensorboard, settings, resumed_at)
        services.append(start_service("TensorBoard", start_writer, lambda: None))
    if config.trackio:
        start_trackio = partial(Trackio, config, directory, settings, resumed_at)
        services.append(start_service("Trackio", start_trackio, lambda: None))
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
        log.info("Trackio: %s", where)

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
