"""The watch over several ranks: one that is dead, stuck or has failed ends all the others, and they tell its name."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch.distributed import DistError, TCPStore

from depthlm.distributed.abort import end, is_consequence, last_words, line_of
from depthlm.distributed.diagnosis import AwakeClock, FailureReport, Heartbeat, Listener, listed, stalled
from depthlm.distributed.launchers import Ranks

log = logging.getLogger("depthlm")

CONNECT = timedelta(seconds=20)
# for what a rank says last to arrive, and for the others to hear it before the first rank takes the store with it
LAST_WORDS = 5.0
# for the others to raise the same by themselves
ALIKE = 5.0


class Activity:
    """Where the main thread marks its progress; costs as good as nothing.

    report: reports an exception that is about to end this rank to the other ranks; any thread may call it.
    """

    def __init__(self) -> None:
        self.report: Callable[[BaseException], None] = lambda error: None
        self.phase, self.step, self.turn, self.limited = "starting", 0, 0, True
        self.marked = time.monotonic()

    def mark(self, phase: str, step: int, limited: bool = True) -> None:
        """The main thread begins this phase of this step.

        limited: whether training.stall_timeout holds in it. All ranks mark the same phases in the same order.
        """
        if step != self.step:
            self.turn = 0
        elif phase != self.phase:
            self.turn += 1
        self.phase, self.step, self.limited = phase, step, limited
        self.marked = time.monotonic()

    def go_on(self) -> None:
        """The main thread is a piece further in the same phase."""
        self.marked = time.monotonic()


@contextmanager
def watch_ranks(ranks: Ranks, rank_timeout: float, stall_timeout: float) -> Iterator[Activity]:
    """Watch all ranks while the block runs; collective. Does nothing on one rank.

    rank_timeout: seconds without a sign of life after which a rank counts as dead; stall_timeout: minutes after which a
    run counts as stuck in which no rank has made a mark. Either ends the process with exit code 1. So does an exception
    on another rank, if this one raises none by itself within seconds; a UserError there ends it with 2, SystemExit with
    its code.
    """
    watch = Activity()
    if ranks.world_size == 1:
        yield watch
        return
    watcher = start_watcher(ranks, watch, rank_timeout, 60 * stall_timeout)
    if watcher is None:
        yield watch
        return
    watch.report = watcher.fail
    try:
        yield watch
    except BaseException as error:
        watcher.fail(error)
        raise
    watcher.leave()


def start_watcher(ranks: Ranks, watch: Activity, rank_timeout: float, stall_timeout: float) -> "Watcher | None":
    """Connect all ranks (collective) and start to watch; None, and a warning, where one does not reach the first.

    stall_timeout: in seconds.
    """
    store, port, failed = None, 0, ""
    if ranks.rank == 0:
        # any free port, so that neither the rendezvous nor another run on this node is in the way
        store = TCPStore("127.0.0.1", 0, None, True, timeout=CONNECT, wait_for_workers=False)
        port = store.port
        store.set("end", "")
        for rank in range(ranks.world_size):
            store.set(f"sign/{rank}", Heartbeat().packed())
    told = gather((port, f"host {socket.gethostname()}, pid {os.getpid()}"), ranks.world_size)
    address, names = (ranks.address or "", int(told[0][0])), {rank: name for rank, (_, name) in enumerate(told)}
    if store is None:
        try:
            store = connect(address)
        except (DistError, OSError) as error:
            failed = str(error).splitlines()[0]
    failures = {rank: reason for rank, reason in enumerate(gather(failed, ranks.world_size)) if reason}
    if failures:
        rank, reason = next(iter(failures.items()))
        if ranks.rank == 0:
            log.warning(
                "%s cannot reach %s:%d (%s), so nobody watches the ranks: one that is stuck ends the run only "
                "when its collective operations time out",
                listed(failures, names), *address, reason,
            )  # fmt: skip
        return None
    assert store is not None
    return Watcher(ranks, watch, store, address, names, rank_timeout, stall_timeout)


def gather(value: object, world_size: int) -> list:
    """What each rank gives; collective."""
    values: list = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def connect(address: tuple[str, int]) -> TCPStore:
    """A client of the first rank's store. Raises OSError or DistError where it cannot be reached."""
    # the store's own attempts are loud, so it is asked quietly first whether anybody listens
    socket.create_connection(address, timeout=CONNECT.total_seconds()).close()
    return TCPStore(*address, None, False, timeout=CONNECT, wait_for_workers=False)


class Watcher:
    """The threads that give this rank's signs of life and listen for the others'.

    The first rank serves the store and judges all; the others judge the first and read what it, or whoever failed, has
    written under `end`.
    """

    def __init__(
        self, ranks: Ranks, watch: Activity, store: TCPStore, address: tuple[str, int], names: dict[int, str],
        rank_timeout: float, stall_timeout: float,
    ) -> None:  # fmt: skip
        self.rank, self.watch, self.store, self.address, self.names = ranks.rank, watch, store, address, names
        self.rank_timeout, self.stall_timeout = rank_timeout, stall_timeout
        self.interval = min(1.0, rank_timeout / 5)
        self.clock = AwakeClock(time.monotonic(), max(1.0, 2 * self.interval))
        judged = range(1, ranks.world_size) if ranks.rank == 0 else (0,)
        self.listener = Listener(judged, names, 0.0)
        self.main = threading.get_ident()
        self.count, self.heard, self.left, self.over = 0, False, False, False
        # what this rank has to say; whether it fails by itself, or since another one has gone; what all are told
        self.words: FailureReport | None = None
        self.failing, self.lost = False, False
        self.verdict: FailureReport | None = None
        self.wake = threading.Event()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._exchange_for_ever, name="watch", daemon=True)]
        if ranks.rank != 0:
            # a store that does not answer blocks whoever asks it, so another one looks at the clock
            self.threads.append(threading.Thread(target=self._guard_for_ever, name="guard", daemon=True))
        for thread in self.threads:
            thread.start()

    def leave(self) -> None:
        """This rank is through: nobody waits for it any more, in whatever order they leave."""
        self.left = True
        self._close()

    def fail(self, error: BaseException) -> None:
        """Tell the others what ends this rank. A mere consequence waits for the culprit's name, and ends with it."""
        if isinstance(error, SystemExit) and not error.code:
            return self.leave()
        if is_consequence(error) and self.threads[0].is_alive():
            self.lost = True
            self.wake.set()
            # the verdict ends the process, from the other thread
            time.sleep(self.rank_timeout + LAST_WORDS + 3 * self.interval)
        self.failing = True
        self.words = last_words(error, self.rank, self.names)
        return self._close()

    def _close(self) -> None:
        self.over = True
        self.wake.set()
        self.threads[0].join(LAST_WORDS)
        if self.rank == 0:
            self._until_heard()

    def _exchange_for_ever(self) -> None:
        broken = False
        while True:
            over = self.over
            try:
                # a client whose connection broke stays broken, and says so aloud each time
                if broken:
                    self.store = connect(self.address)
                self._exchange()
                broken = False
            except (DistError, RuntimeError, OSError):
                broken = True
            if self.verdict is not None:
                return self._obey(self.verdict)
            if over:
                return None
            if self.rank != 0 and self.listener.last[0].left:
                return self._acknowledge()
            if self.rank == 0:
                self._judge()
            self.wake.wait(self.interval)
            self.wake.clear()

    def _guard_for_ever(self) -> None:
        while self.threads[0].is_alive() and not self.over:
            time.sleep(self.interval)
            with self.lock:
                verdict = self.listener.silent(self.rank_timeout, self.clock.tick(time.monotonic()))
            if verdict is not None and self.verdict is None and not self.over:
                return end(verdict, self.rank, self.main)

    def _exchange(self) -> None:
        """Give a sign, hear the others', say the last words."""
        self.store.set(f"sign/{self.rank}", self._sign().packed())
        if self.words is not None:
            self.store.compare_set("end", "", self.words.packed())
        others = list(self.listener.last)
        *signs, verdict = self.store.multi_get([*(f"sign/{rank}" for rank in others), "end"])
        with self.lock:
            now = self.clock.tick(time.monotonic())
            for rank, sign in zip(others, signs, strict=True):
                self.listener.hear(rank, Heartbeat.unpacked(sign), now)
        if verdict:
            self.verdict = FailureReport.unpacked(verdict)
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.heard = True
        with suppress(DistError, RuntimeError):
            self.store.set(f"sign/{self.rank}", self._sign().packed())

    def _judge(self) -> None:
        with self.lock:
            silent = self.listener.silent(self.rank_timeout, self.clock.tick(time.monotonic()))
            signs = {0: self._sign()} | self.listener.last
        verdict = silent or stalled(signs, self.names, self.stall_timeout)
        if verdict is not None and not self.over:
            self.store.compare_set("end", "", verdict.packed())
            self.wake.set()

    def _obey(self, verdict: FailureReport) -> None:
        """End as another rank's words, or the first one's judgement, demand."""
        deadline = time.monotonic() + (ALIKE if verdict.raised else 0.0)
        while time.monotonic() < deadline and not self.lost:
            if self.over:
                return
            time.sleep(0.02)
        if self.over:
            return
        if self.rank == 0:
            self._until_heard()
        end(verdict, self.rank, self.main)

    def _until_heard(self) -> None:
        """The store ends with the first rank: until the others know, are through themselves, or are silent anyway."""
        silent = self.listener.silent(self.rank_timeout, self.clock.seconds)
        others = [rank for rank in self.listener.last if silent is None or rank not in silent.ranks]
        deadline = time.monotonic() + LAST_WORDS
        while others and time.monotonic() < deadline:
            signs = [Heartbeat.unpacked(text) for text in self.store.multi_get([f"sign/{rank}" for rank in others])]
            others = [rank for rank, sign in zip(others, signs, strict=True) if not (sign.heard or sign.left)]
            time.sleep(0.01)

    def _sign(self) -> Heartbeat:
        self.count += 1
        watch = self.watch
        return Heartbeat(
            count=self.count, step=watch.step, turn=watch.turn, phase=watch.phase,
            still=time.monotonic() - watch.marked, where=line_of(sys._current_frames().get(self.main)),
            limited=watch.limited, heard=self.heard, left=self.left,
        )  # fmt: skip
