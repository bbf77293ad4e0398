"""The watchdog over several ranks: if one is dead, stuck or has failed, all others end and log its name."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from depthlm.distributed.diagnosis import (
    AwakeClock,
    FailureReport,
    Heartbeat,
    Listener,
    abort,
    is_consequence,
    line_of,
    name_ranks,
    report_exception,
    report_stalled,
)
from depthlm.distributed.launchers import Ranks
from depthlm.distributed.process_group import gather

log = logging.getLogger("depthlm")

CONNECT = timedelta(seconds=20)
# seconds for a failure report to arrive, and for the other ranks to read it before rank 0 ends and the store with it
REPORT_SECONDS = 5.0
# seconds for the other ranks to raise the same exception by themselves
SAME_ERROR_SECONDS = 5.0


class Activity:
    """The progress of this rank, as marked by its main thread; marking costs next to nothing.

    report: reports an exception that is about to end this rank to the other ranks; any thread may call it.
    record: is called with the reason before the failure of another rank ends this one.
    """

    def __init__(self) -> None:
        self.report: Callable[[BaseException], None] = lambda error: None
        self.record: Callable[[str], None] = lambda reason: None
        self.phase, self.step, self.turn, self.limited = "starting", 0, 0, True
        self.marked = time.monotonic()

    def mark(self, phase: str, step: int, limited: bool = True) -> None:
        """Mark that the main thread begins a phase of a step.

        limited: whether training.stall_timeout applies to the phase. All ranks mark the same phases in the same order.
        """
        if step != self.step:
            self.turn = 0
        elif phase != self.phase:
            self.turn += 1
        self.phase, self.step, self.limited = phase, step, limited
        self.marked = time.monotonic()

    def mark_progress(self) -> None:
        """Mark progress within the current phase."""
        self.marked = time.monotonic()


@contextmanager
def watch_ranks(ranks: Ranks, rank_timeout: float, stall_timeout: float) -> Iterator[Activity]:
    """Watch all ranks while the block runs; collective. Does nothing on one rank.

    rank_timeout: seconds without a heartbeat after which a rank counts as dead. stall_timeout: minutes without a mark
    on any rank after which the run counts as stuck. Either ends the process with exit code 1. So does an exception on
    another rank, unless this rank raises one itself within seconds; a UserError there ends the process with code 2,
    SystemExit with its own code.
    """
    activity = Activity()
    watcher = None if ranks.world_size == 1 else start_watcher(ranks, activity, rank_timeout, 60 * stall_timeout)
    if watcher is None:
        yield activity
        return
    activity.report = watcher.fail
    try:
        yield activity
    except BaseException as error:
        watcher.fail(error)
        raise
    watcher.leave()


def start_watcher(ranks: Ranks, activity: Activity, rank_timeout: float, stall_timeout: float) -> "Watcher | None":
    """Connect all ranks and start the watchdog; collective. None, with a warning, if a rank cannot reach rank 0.

    stall_timeout: in seconds.
    """
    store, port, failed = None, 0, ""
    if ranks.rank == 0:
        # any free port: the port of the rendezvous, and those of other runs on this node, are taken
        store = TCPStore("127.0.0.1", 0, None, True, timeout=CONNECT, wait_for_workers=False)
        port = store.port
        store.set("end", "")
        for rank in range(ranks.world_size):
            store.set(f"sign/{rank}", Heartbeat().pack())
    hosts = gather((port, f"host {socket.gethostname()}, pid {os.getpid()}"))
    address, names = (ranks.address or "", int(hosts[0][0])), {rank: name for rank, (_, name) in enumerate(hosts)}
    if store is None:
        try:
            store = connect(address)
        except (DistError, OSError) as error:
            failed = str(error).splitlines()[0]
    failures = {rank: reason for rank, reason in enumerate(gather(failed)) if reason}
    if failures:
        rank, reason = next(iter(failures.items()))
        if ranks.rank == 0:
            log.warning(
                "%s cannot reach %s:%d (%s), so the watchdog is off: a stuck rank ends the run only when its "
                "collective operations time out",
                name_ranks(failures, names),
                *address,
                reason,
            )
        return None
    assert store is not None
    return Watcher(ranks, activity, store, address, names, rank_timeout, stall_timeout)


def connect(address: tuple[str, int]) -> TCPStore:
    """Return a client of the store on rank 0. Raises OSError or DistError if rank 0 cannot be reached."""
    # TCPStore logs every failed attempt, so a plain connection checks first whether the store is listening
    socket.create_connection(address, timeout=CONNECT.total_seconds()).close()
    return TCPStore(*address, None, False, timeout=CONNECT, wait_for_workers=False)


class Watcher:
    """The threads that send this rank's heartbeats and read those of the others.

    Rank 0 serves the store and checks all ranks. The others check rank 0, and read the failure report that rank 0, or
    the rank that failed, has written to the key `end`.
    """

    def __init__(
        self,
        ranks: Ranks,
        activity: Activity,
        store: TCPStore,
        address: tuple[str, int],
        names: dict[int, str],
        rank_timeout: float,
        stall_timeout: float,
    ) -> None:
        self.rank, self.activity, self.store, self.address, self.names = ranks.rank, activity, store, address, names
        self.rank_timeout, self.stall_timeout = rank_timeout, stall_timeout
        self.interval = min(1.0, rank_timeout / 5)
        self.clock = AwakeClock(time.monotonic(), max(1.0, 2 * self.interval))
        monitored = range(1, ranks.world_size) if ranks.rank == 0 else (0,)
        self.listener = Listener(monitored, names, 0.0)
        self.main = threading.get_ident()
        self.count, self.informed, self.finished, self.closing = 0, False, False, False
        # the failure report of this rank; whether it fails by itself, or because another rank is gone
        self.own_report: FailureReport | None = None
        self.failing, self.lost = False, False
        # the failure report that ends all ranks
        self.final_report: FailureReport | None = None
        self.wake = threading.Event()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._exchange_loop, name="heartbeat", daemon=True)]
        if ranks.rank != 0:
            # a store that does not answer blocks the thread that reads it, so a second thread checks the timeout
            self.threads.append(threading.Thread(target=self._guard_loop, name="guard", daemon=True))
        for thread in self.threads:
            thread.start()

    def leave(self) -> None:
        """Announce that this rank has finished, so that no other waits for it; ranks may leave in any order."""
        self.finished = True
        self._close()

    def fail(self, error: BaseException) -> None:
        """Report the exception that ends this rank; a consequence of another failure waits for the report on that."""
        if isinstance(error, SystemExit) and not error.code:
            return self.leave()
        if is_consequence(error) and self.threads[0].is_alive():
            self.lost = True
            self.wake.set()
            # the failure report ends the process from the other thread
            time.sleep(self.rank_timeout + REPORT_SECONDS + 3 * self.interval)
        self.failing = True
        self.own_report = report_exception(error, self.rank, self.names)
        return self._close()

    def _close(self) -> None:
        self.closing = True
        self.wake.set()
        self.threads[0].join(REPORT_SECONDS)
        if self.rank == 0:
            self._wait_for_ranks()

    def _exchange_loop(self) -> None:
        broken = False
        while True:
            closing = self.closing
            try:
                # a client whose connection broke stays broken, and logs an error at every use
                if broken:
                    self.store = connect(self.address)
                self._exchange()
                broken = False
            except (DistError, RuntimeError, OSError):
                broken = True
            if self.final_report is not None:
                return self._abort(self.final_report)
            if closing:
                return None
            if self.rank != 0 and self.listener.last[0].finished:
                return self._acknowledge()
            if self.rank == 0:
                self._check_ranks()
            self.wake.wait(self.interval)
            self.wake.clear()

    def _guard_loop(self) -> None:
        while self.threads[0].is_alive() and not self.closing:
            time.sleep(self.interval)
            with self.lock:
                report = self.listener.report_silent(self.rank_timeout, self.clock.tick(time.monotonic()))
            if report is not None and self.final_report is None and not self.closing:
                return abort(report, self.rank, self.main, self.activity.record)

    def _exchange(self) -> None:
        """Send a heartbeat and any failure report, and read those of the others."""
        self.store.set(f"sign/{self.rank}", self._heartbeat().pack())
        if self.own_report is not None:
            self.store.compare_set("end", "", self.own_report.pack())
        others = list(self.listener.last)
        *heartbeats, report = self.store.multi_get([*(f"sign/{rank}" for rank in others), "end"])
        with self.lock:
            now = self.clock.tick(time.monotonic())
            for rank, heartbeat in zip(others, heartbeats, strict=True):
                self.listener.hear(rank, Heartbeat.unpack(heartbeat), now)
        if report:
            self.final_report = FailureReport.unpack(report)
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.informed = True
        with suppress(DistError, RuntimeError):
            self.store.set(f"sign/{self.rank}", self._heartbeat().pack())

    def _check_ranks(self) -> None:
        with self.lock:
            silent = self.listener.report_silent(self.rank_timeout, self.clock.tick(time.monotonic()))
            heartbeats = {0: self._heartbeat()} | self.listener.last
        report = silent or report_stalled(heartbeats, self.names, self.stall_timeout)
        if report is not None and not self.closing:
            self.store.compare_set("end", "", report.pack())
            self.wake.set()

    def _abort(self, report: FailureReport) -> None:
        """End this process because of another rank's failure report, unless it raises an exception by itself."""
        deadline = time.monotonic() + (SAME_ERROR_SECONDS if report.raised else 0.0)
        while time.monotonic() < deadline and not self.lost:
            if self.closing:
                return
            time.sleep(0.02)
        if self.closing:
            return
        if self.rank == 0:
            self._wait_for_ranks()
        abort(report, self.rank, self.main, self.activity.record)

    def _wait_for_ranks(self) -> None:
        """Wait on rank 0, whose end ends the store, until the others have read the report, have left, or are silent."""
        silent = self.listener.report_silent(self.rank_timeout, self.clock.seconds)
        others = [rank for rank in self.listener.last if silent is None or rank not in silent.ranks]
        deadline = time.monotonic() + REPORT_SECONDS
        while others and time.monotonic() < deadline:
            texts = self.store.multi_get([f"sign/{rank}" for rank in others])
            heartbeats = map(Heartbeat.unpack, texts)
            others = [
                rank for rank, beat in zip(others, heartbeats, strict=True) if not (beat.informed or beat.finished)
            ]
            time.sleep(0.01)

    def _heartbeat(self) -> Heartbeat:
        self.count += 1
        activity = self.activity
        return Heartbeat(
            count=self.count,
            step=activity.step,
            turn=activity.turn,
            phase=activity.phase,
            idle=time.monotonic() - activity.marked,
            line=line_of(sys._current_frames().get(self.main)),
            limited=activity.limited,
            informed=self.informed,
            finished=self.finished,
        )
