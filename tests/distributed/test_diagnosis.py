"""Who is blamed when ranks are silent or stand still."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.distributed.diagnosis import AwakeClock, FailureReport, Heartbeat, Listener, listed, stalled

NAMES = {rank: f"host gpu-{rank // 2}, pid {100 + rank}" for rank in range(20)}
STILL = Heartbeat(count=1, step=12, turn=1, phase="backward", still=61.0, where="all_reduce (c10d.py:9)")


def test_a_rank_is_silent_when_its_count_stays_the_same() -> None:
    listener = Listener([1, 2], NAMES, 0.0)
    for second in range(1, 100):
        listener.hear(1, Heartbeat(count=second), second)
        listener.hear(2, Heartbeat(count=min(second, 30), step=7, phase="forward"), second)
        assert (listener.silent(60, second) is not None) == (second > 90)
    verdict = listener.silent(60, 99)
    assert verdict is not None
    assert verdict.ranks == (2,)
    assert verdict.text == (
        "rank 2 (host gpu-1, pid 102) has given no sign of life for 60 s, the last in step 7, forward"
    )


def test_a_rank_that_has_left_owes_no_sign() -> None:
    listener = Listener([1], NAMES, 0.0)
    listener.hear(1, Heartbeat(count=1, left=True), 1.0)
    assert listener.silent(60, 1000) is None


def test_the_hours_of_the_listeners_own_sleep_are_nobody_elses_silence() -> None:
    clock = AwakeClock(0.0, 2.0)
    assert [clock.tick(now) for now in (1.0, 2.0, 7200.0, 7201.0)] == [1.0, 2.0, 4.0, 5.0]


def test_the_rank_that_is_behind_holds_up_the_others() -> None:
    behind = replace(STILL, turn=0, phase="forward", where="read (mine.py:3)")
    verdict = stalled({0: STILL, 1: STILL, 2: behind}, NAMES, 60)
    assert verdict is not None
    assert verdict.ranks == (2,)
    assert verdict.text == (
        "rank 2 (host gpu-1, pid 102) has made no progress for 61 s, in step 12, forward, at read (mine.py:3); "
        "the others wait"
    )
    earlier_step = stalled({0: STILL, 1: replace(STILL, step=11, turn=9)}, NAMES, 60)
    assert earlier_step is not None
    assert earlier_step.ranks == (1,)


def test_where_all_wait_at_one_place_their_lines_are_told() -> None:
    verdict = stalled({0: STILL, 1: STILL, 2: replace(STILL, where="read (mine.py:3)")}, NAMES, 60)
    assert verdict is not None
    assert verdict.text == (
        "all ranks have made no progress for 61 s and wait at the same place, step 12, backward: "
        "rank 2 (host gpu-1, pid 102) at read (mine.py:3); "
        "rank 0 (host gpu-0, pid 100) and rank 1 (host gpu-0, pid 101) at all_reduce (c10d.py:9)"
    )


@pytest.mark.parametrize(
    "moving", [replace(STILL, still=59.0), replace(STILL, limited=False, phase="preparing the data")]
)
def test_nobody_is_stuck_while_one_moves_or_may_take_its_time(moving: Heartbeat) -> None:
    assert stalled({0: moving, 1: STILL}, NAMES, 60) is None


def test_who_has_left_holds_up_nobody() -> None:
    assert stalled({0: replace(STILL, left=True)}, NAMES, 60) is None
    verdict = stalled({0: replace(STILL, left=True, step=1), 1: STILL}, NAMES, 60)
    assert verdict is not None
    assert verdict.ranks == (1,)


def test_of_many_ranks_the_first_are_named() -> None:
    text = listed(range(20), NAMES)
    assert text.endswith("rank 7 (host gpu-3, pid 107) and 12 more")
    assert "rank 8" not in text


@given(st.builds(Heartbeat, count=st.integers(0), still=st.floats(0, 1e9), phase=st.text(), where=st.text()), st.text())
def test_what_goes_through_the_store_comes_out_the_same(sign: Heartbeat, text: str) -> None:
    assert Heartbeat.unpacked(sign.packed().encode()) == sign
    verdict = FailureReport((1, 3), text, 2, raised=True)
    assert FailureReport.unpacked(verdict.packed().encode()) == verdict
