"""Find the ranks to blame when a run stalls or fails, and end this process when another rank has failed."""

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from torch.distributed import DistError

from depthlm.distributed.process_group import Rank0Error
from depthlm.distributed.signals import INTERRUPTED, STOPPED
from depthlm.errors import UserError
from depthlm.locations import PACKAGE

MAX_NAMED = 8
log = logging.getLogger("depthlm")
LOG_SECONDS = 5.0


class Packed:
    """A record that is text in the store."""

    def pack(self) -> str:
        """Return this as text for the store."""
        return json.dumps(vars(self))

    @classmethod
    def unpack(cls, text: str | bytes) -> Self:
        """Return the record from its text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Heartbeat(Packed):
    """A heartbeat of a rank.

    count: increases with every heartbeat; step, turn, phase: the main thread's last mark, turn being the number of
    phases before it in the step; idle: seconds since that mark; line: the line of code the main thread is at; limited:
    whether the stall timeout applies; informed: the rank knows that the run, or rank 0, ends; finished: the rank has
    finished and is not checked any more.
    """

    count: int = 0
    step: int = 0
    turn: int = 0
    phase: str = "starting"
    idle: float = 0.0
    line: str = ""
    limited: bool = True
    informed: bool = False
    finished: bool = False

    def place(self) -> str:
        """Describe the last mark."""
        return f"step {self.step}, {self.phase}"


@dataclass(frozen=True)
class FailureReport(Packed):
    """Why all ranks end: the ranks to blame, the message, and the exit code.

    raised: the cause is an exception, which the other ranks may raise by themselves within moments.
    """

    ranks: list[int]
    text: str
    code: int = 1
    raised: bool = False


class AwakeClock:
    """Seconds in which this process ran: time for which it was stopped does not count as silence of other ranks."""

    def __init__(self, now: float, longest: float) -> None:
        self.before, self.longest, self.seconds = now, longest, 0.0

    def tick(self, now: float) -> float:
        """Return the seconds so far; a gap between two ticks counts as at most `longest`."""
        self.seconds += min(max(0.0, now - self.before), self.longest)
        self.before = now
        return self.seconds


class Listener:
    """The last heartbeat of each rank, and its time by the listener's own clock."""

    def __init__(self, ranks: Iterable[int], names: Mapping[int, str], now: float) -> None:
        self.names, self.last, self.since = names, {rank: Heartbeat() for rank in ranks}, dict.fromkeys(ranks, now)

    def hear(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat as read from the store, new or not."""
        if heartbeat.count != self.last[rank].count:
            self.since[rank] = now
        self.last[rank] = heartbeat

    def report_silent(self, limit: float, now: float) -> FailureReport | None:
        """Report the ranks that have sent no heartbeat for `limit` seconds; None if there are none."""
        blamed = [rank for rank, beat in self.last.items() if not beat.finished and now - self.since[rank] > limit]
        if not blamed:
            return None
        place = self.last[blamed[0]].place()
        verb = "has" if len(blamed) == 1 else "have"
        silence = f"{verb} sent no heartbeat for {limit:g} s, the last one in {place}"
        return FailureReport(blamed, f"{name_ranks(blamed, self.names)} {silence}")


def report_stalled(heartbeats: Mapping[int, Heartbeat], names: Mapping[int, str], limit: float) -> FailureReport | None:
    """Report the ranks that hold up a run in which no rank has made a mark for `limit` seconds; None if one has.

    The ranks that are behind the others are to blame. If all are at the same place, the report lists their code lines.
    """
    active = {rank: beat for rank, beat in heartbeats.items() if not beat.finished}
    if not active or any(beat.idle <= limit or not beat.limited for beat in active.values()):
        return None
    pause = f"no progress for {min(beat.idle for beat in active.values()):.0f} s"
    earliest = min((beat.step, beat.turn) for beat in active.values())
    blamed = [rank for rank, beat in active.items() if (beat.step, beat.turn) == earliest]
    heartbeat = active[blamed[0]]
    if len(blamed) < len(active):
        verb = "has" if len(blamed) == 1 else "have"
        line = f", at {heartbeat.line}" if heartbeat.line else ""
        text = f"{name_ranks(blamed, names)} {verb} made {pause}, in {heartbeat.place()}{line}; the others wait"
        return FailureReport(blamed, text)
    lines: dict[str, list[int]] = {}
    for rank, other in active.items():
        lines.setdefault(other.line, []).append(rank)
    fewest_first = sorted(lines.items(), key=lambda item: len(item[1]))
    locations = "; ".join(f"{name_ranks(ranks, names)} at {line or 'an unknown line'}" for line, ranks in fewest_first)
    return FailureReport(
        blamed, f"all ranks have made {pause} and wait at the same place, {heartbeat.place()}: {locations}"
    )


def name_ranks(ranks: Iterable[int], names: Mapping[int, str]) -> str:
    """Name ranks as `rank 3 (host gpu-7, pid 1234)`; of many, only the first eight are named."""
    ranks = list(ranks)
    named = [f"rank {rank} ({names[rank]})" for rank in ranks[:MAX_NAMED]]
    if len(ranks) > MAX_NAMED:
        named.append(f"{len(ranks) - MAX_NAMED} more")
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception is only the consequence of another rank's end."""
    if isinstance(error, (DistError, Rank0Error)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(
        text in message for text in ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )


def report_exception(error: BaseException, rank: int, names: dict[int, str]) -> FailureReport:
    """Return the failure report of an exception for the other ranks."""
    name = name_ranks([rank], names)
    if isinstance(error, UserError):
        return FailureReport([rank], f"{name}: {error}", code=2, raised=True)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return FailureReport([rank], f"{name} ended with exit code {code}", code=code, raised=True)
    return FailureReport([rank], f"{name} failed: {traceback.format_exception_only(error)[-1].strip()}", raised=True)


def line_of(frame: FrameType | None) -> str:
    """Name the innermost call, and the innermost in depthlm: `all_reduce (c10d.py:2987) of train_step (step.py:38)`."""
    if frame is None:
        return ""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
        caller = caller.f_back
    frames = [frame] if caller is None or caller is frame else [frame, caller]
    return " of ".join(f"{f.f_code.co_name} ({Path(f.f_code.co_filename).name}:{f.f_lineno})" for f in frames)


def abort(report: FailureReport, rank: int, main: int, record: Callable[[str], None]) -> None:
    """Log the failure report and end this process, even if the main thread is in an uninterruptible operation.

    record: called with the text of the report, unless a signal ended the other rank.
    """
    # the thread that holds the lock of the log may be stuck too, and so may the file system
    log_thread = threading.Thread(target=_log_report, args=(report, rank, main, record), daemon=True)
    log_thread.start()
    log_thread.join(LOG_SECONDS)
    os._exit(report.code)


def _log_report(report: FailureReport, rank: int, main: int, record: Callable[[str], None]) -> None:
    frame = sys._current_frames().get(main)
    log.error("%s; rank %d ends", report.text, rank)
    if rank in report.ranks and frame is not None:
        log.error("rank %d is at:\n%s", rank, "".join(traceback.format_stack(frame)).rstrip())
    if report.code not in (STOPPED, INTERRUPTED):
        record(report.text)
    for handler in log.handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
