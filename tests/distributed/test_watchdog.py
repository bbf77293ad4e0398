"""The watchdog, with ranks as threads of one process: which ranks end, and with which report."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from depthlm.distributed import watchdog
from depthlm.distributed.diagnosis import FailureReport, Heartbeat
from depthlm.distributed.launchers import Ranks
from depthlm.distributed.process_group import Rank0Error
from depthlm.distributed.watchdog import Activity, Watcher, connect, watch_ranks
from depthlm.errors import UserError

CLOSED = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4")
TIMEOUT = 1.0


class Fleet:
    """Three ranks, of which those started have a watchdog; `ended` collects the report that would end each process."""

    def __init__(self) -> None:
        self.server = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
        self.server.set("end", "")
        for rank in range(3):
            self.server.set(f"sign/{rank}", Heartbeat().pack())
        self.ended: dict[int, FailureReport] = {}
        self.watchers: dict[int, Watcher] = {}
        self.names = {rank: f"host h{rank}, pid {rank}" for rank in range(3)}

    def start(self, rank: int, stall_timeout: float = 1000.0) -> Activity:
        address, activity = ("127.0.0.1", self.server.port), Activity()
        ranks = Ranks(rank, rank, 3, 3, "srun", 1, *address)
        store = self.server if rank == 0 else connect(address)
        self.watchers[rank] = Watcher(ranks, activity, store, address, self.names, TIMEOUT, stall_timeout)
        return activity

    def start_all(self, stall_timeout: float = 1000.0) -> list[Activity]:
        return [self.start(rank, stall_timeout) for rank in range(3)]

    def end(self, report: FailureReport, rank: int, *_: object) -> None:
        self.ended.setdefault(rank, report)

    def wait(self, *ranks: int, seconds: float = 5.0) -> float:
        """Wait until these ranks have ended; returns the seconds."""
        started = time.monotonic()
        while not set(ranks) <= self.ended.keys():
            assert time.monotonic() - started < seconds, self.ended
            time.sleep(0.01)
        return time.monotonic() - started

    def side_by_side(self, *actions: Callable[[], None]) -> float:
        """Run all actions in parallel, each as the main thread of a rank would; returns the seconds."""
        started = time.monotonic()
        threads = [threading.Thread(target=action) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - started


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    fleet = Fleet()
    monkeypatch.setattr(watchdog, "abort", fleet.end)
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "SAME_ERROR_SECONDS", 0.5)
    yield fleet
    for watcher in fleet.watchers.values():
        watcher.finished = watcher.closing = True


def test_a_silent_rank_ends_all_others_with_its_name(fleet):
    fleet.start(0)
    fleet.start(1)
    assert TIMEOUT <= fleet.wait(0, 1) < TIMEOUT + 1.5
    assert fleet.ended[0] == fleet.ended[1]
    assert fleet.ended[0].ranks == [2]
    assert fleet.ended[0].text.startswith("rank 2 (host h2, pid 2) has sent no heartbeat for 1 s")
    assert fleet.ended[0].code == 1


def test_a_silent_rank_0_is_named_by_each_of_the_others(fleet):
    fleet.start(1)
    fleet.start(2)
    fleet.wait(1, 2)
    assert all(report.ranks == [0] for report in fleet.ended.values())


def test_progress_on_one_rank_or_a_phase_without_limit_keeps_all_ranks_running_while_the_wall_clock_jumps(
    fleet, monkeypatch
):
    now, activities = time.time, fleet.start_all(stall_timeout=0.5)
    monkeypatch.setattr(time, "time", lambda: now() + 5 * 3600)
    for _ in range(12):
        activities[2].mark_progress()
        time.sleep(0.1)
    monkeypatch.setattr(time, "time", lambda: now() - 7 * 3600)
    activities[0].mark("preparing the data", 0, limited=False)
    time.sleep(1.1)
    assert fleet.ended == {}
    activities[0].mark("starting", 0)
    fleet.wait(0, 1, 2)


@pytest.mark.parametrize(
    ("failing", "error", "code", "words"),
    [
        (0, ValueError("out of luck"), 1, " failed: ValueError: out of luck"),
        (1, UserError("no such file"), 2, ": no such file"),
        (1, SystemExit(75), 75, " ended with exit code 75"),
    ],
)
def test_the_others_end_within_moments_with_the_report_and_the_code_of_the_rank_that_failed(
    fleet, failing, error, code, words
):
    fleet.start_all()
    fleet.watchers[failing].fail(error)
    fleet.wait(*{0, 1, 2} - {failing}, seconds=2.0)
    assert failing not in fleet.ended
    assert {report.code for report in fleet.ended.values()} == {code}
    (text,) = {report.text for report in fleet.ended.values()}
    assert text == f"rank {failing} (host h{failing}, pid {failing}){words}"


def test_ranks_that_all_raise_the_same_exception_end_by_themselves(fleet):
    fleet.start_all()
    error = UserError("no such file")
    seconds = fleet.side_by_side(*(lambda watcher=watcher: watcher.fail(error) for watcher in fleet.watchers.values()))  # type: ignore[misc]
    assert seconds < 0.9
    time.sleep(0.7)
    assert fleet.ended == {}


@pytest.mark.parametrize("error", [CLOSED, Rank0Error("no space")])
def test_a_consequence_waits_for_the_report_on_the_rank_to_blame(fleet, error):
    fleet.start(0)
    fleet.start(1)
    # a rank that loses its connection to rank 2, which never sent a heartbeat
    threading.Thread(target=fleet.watchers[1].fail, args=(error,), daemon=True).start()
    fleet.wait(0, 1)
    assert fleet.ended[0].ranks == fleet.ended[1].ranks == [2]


def test_ranks_leave_quietly_rank_0_last(fleet):
    fleet.start_all()

    def leave(place: int, rank: int) -> None:
        time.sleep(0.1 * place)
        fleet.watchers[rank].leave()

    seconds = fleet.side_by_side(*(lambda p=p, r=r: leave(p, r) for p, r in enumerate((2, 1, 0))))  # type: ignore[misc]
    assert seconds < 0.9
    time.sleep(1.5 * TIMEOUT)
    assert fleet.ended == {}


def test_a_single_rank_has_no_watchdog_and_a_mark_counts_the_phases_of_its_step():
    before = threading.active_count()
    with watch_ranks(Ranks(0, 0, 1, 1, "python"), 1.0, 1.0) as activity:
        for step, phase, turn in ((1, "forward", 0), (1, "forward", 0), (1, "backward", 1), (2, "forward", 0)):
            activity.mark(phase, step)
            assert (activity.step, activity.phase, activity.turn) == (step, phase, turn)
        assert threading.active_count() == before
