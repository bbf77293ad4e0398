"""A service that records a run, called from a thread of its own, since any of its calls may hang."""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

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


class Queued:
    """A service whose calls wait in a queue for its thread, so that training never waits. It ends after a failure."""

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


def started(name: str, start: Callable[[], Service | None], give_up: Callable[[], None]) -> Queued | None:
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
    return None if service is None else Queued(service)
