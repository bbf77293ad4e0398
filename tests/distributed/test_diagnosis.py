"""Which ranks are blamed when ranks are silent or make no progress."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from depthlm.distributed.diagnosis import AwakeClock, FailureReport, Heartbeat, Listener, report_stalled

NAMES = {rank: f"host gpu-{rank // 2}, pid {100 + rank}" for rank in range(20)}
STILL = Heartbeat(count=1, step=12, turn=1, phase="backward", idle=61.0, line="all_reduce (c10d.py:9)")


def test_a_rank_is_silent_when_its_count_stays_the_same():
    listener = Listener([1, 2], NAMES, 0.0)
    for second in range(1, 100):
        listener.hear(1, Heartbeat(count=second), second)
        listener.hear(2, Heartbeat(count=min(second, 30), step=7, phase="forward"), second)
        assert (listener.report_silent(60, second) is not None) == (second > 90)
    report = listener.report_silent(60, 99)
    assert report is not None
    assert report.ranks == [2]
    assert report.text == (
        "rank 2 (host gpu-1, pid 102) has sent no heartbeat for 60 s, the last one in step 7, forward"
    )


def test_time_for_which_the_listener_was_stopped_does_not_count_as_silence():
    clock = AwakeClock(0.0, 2.0)
    assert [clock.tick(now) for now in (1.0, 2.0, 7200.0, 7201.0)] == [1.0, 2.0, 4.0, 5.0]


def test_the_rank_that_is_behind_is_blamed():
    behind = replace(STILL, turn=0, phase="forward", line="read (mine.py:3)")
    report = report_stalled({0: STILL, 1: STILL, 2: behind}, NAMES, 60)
    assert report is not None
    assert report.ranks == [2]
    assert report.text == (
        "rank 2 (host gpu-1, pid 102) has made no progress for 61 s, in step 12, forward, at read (mine.py:3); "
        "the others wait"
    )
    earlier_step = report_stalled({0: STILL, 1: replace(STILL, step=11, turn=9)}, NAMES, 60)
    assert earlier_step is not None
    assert earlier_step.ranks == [1]


def test_if_all_ranks_wait_at_one_place_their_lines_are_reported():
    report = report_stalled({0: STILL, 1: STILL, 2: replace(STILL, line="read (mine.py:3)")}, NAMES, 60)
    assert report is not None
    assert report.text == (
        "all ranks have made no progress for 61 s and wait at the same place, step 12, backward: "
        "rank 2 (host gpu-1, pid 102) at read (mine.py:3); "
        "rank 0 (host gpu-0, pid 100) and rank 1 (host gpu-0, pid 101) at all_reduce (c10d.py:9)"
    )


def test_no_rank_is_stalled_while_one_makes_progress_or_has_no_limit_and_one_that_has_left_never_is():
    for moving in (replace(STILL, idle=59.0), replace(STILL, limited=False, phase="preparing the data")):
        assert report_stalled({0: moving, 1: STILL}, NAMES, 60) is None
    left = replace(STILL, finished=True, step=1)
    assert report_stalled({0: left}, NAMES, 60) is None
    report = report_stalled({0: left, 1: STILL}, NAMES, 60)
    assert report is not None
    assert report.ranks == [1]


@given(st.builds(Heartbeat, count=st.integers(0), idle=st.floats(0, 1e9), phase=st.text(), line=st.text()), st.text())
def test_packing_and_unpacking_returns_the_same(heartbeat, text):
    assert Heartbeat.unpack(heartbeat.pack().encode()) == heartbeat
    report = FailureReport([1, 3], text, 2, raised=True)
    assert FailureReport.unpack(report.pack().encode()) == report
