"""Calls from rank 0: results, failures, hangs and stops."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from depthlm.distributed.calls import Call, Send, serve
from depthlm.distributed.watchdog import Activity


def served(
    work: Callable[[Call, Send], None], stopping: Callable[[], bool] = lambda: False, patience: float = 60.0
) -> tuple[str | None, list[Any]]:
    """Serve the work of rank 0. Returns why it failed, and what this rank has received."""
    received: list[Any] = []
    functions = {"rank": lambda factor: factor * (1 + torch.distributed.get_rank()), "divide": lambda by: 1 / by}
    functions["uneven"] = lambda _: 1 / (1 - torch.distributed.get_rank())
    failure = serve(work, functions, received.append, Activity(), stopping, patience, torch.device("cpu"))
    return failure, received


def call_and_fail() -> tuple[str | None, list[Any]]:
    def work(call: Call, send: Send) -> None:
        send(call("rank", 10))
        call("divide", 0)

    return served(work)


def test_every_rank_computes_a_call_and_receives_what_rank_0_sends_until_it_fails(two_ranks):
    failure = "rank 0: ZeroDivisionError: division by zero"
    assert two_ranks(call_and_fail) == [(failure, [[10, 20]])] * 2


def fail_on_one_rank() -> tuple[str | None, list[Any]]:
    # rank 1 divides by zero
    return served(lambda call, send: call("uneven", None))


def test_a_failure_on_one_rank_blocks_no_other(two_ranks):
    assert two_ranks(fail_on_one_rank) == [("rank 1: ZeroDivisionError: division by zero", [])] * 2


def hang() -> tuple[str | None, list[Any]]:
    return served(lambda call, send: threading.Event().wait(), patience=0.1)  # type: ignore[arg-type, return-value]


def test_a_thread_that_hangs_is_abandoned(two_ranks):
    started = time.monotonic()
    assert two_ranks(hang) == [("no progress for 0 min", [])] * 2
    assert time.monotonic() - started < 10


def stop_on_rank_1() -> tuple[bool, str | None]:
    ended = threading.Event()

    def work(call: Call, send: Send) -> None:
        try:
            while True:
                call("rank", 1)
        finally:
            ended.set()

    calls = iter(range(3))
    failure, _ = served(work, lambda: torch.distributed.get_rank() == 1 and next(calls, None) is None)
    return torch.distributed.get_rank() == 1 or ended.wait(10), failure


def test_a_stop_on_one_rank_ends_the_work_of_rank_0(two_ranks):
    assert two_ranks(stop_on_rank_1) == [(True, "")] * 2
