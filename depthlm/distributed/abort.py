"""What a rank says of its own end, and how it ends when another one's demands it."""

import logging
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from torch.distributed import DistError

from depthlm.distributed.collectives import Rank0Error
from depthlm.distributed.diagnosis import FailureReport, listed
from depthlm.errors import UserError
from depthlm.locations import PACKAGE

log = logging.getLogger("depthlm")

TELLING = 5.0


def is_consequence(error: BaseException) -> bool:
    """Whether this is how a rank notices that another one has gone."""
    if isinstance(error, (DistError, Rank0Error)):
        return True
    told = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in told for sign in ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )


def last_words(error: BaseException, rank: int, names: dict[int, str]) -> FailureReport:
    """What the others are told of an exception."""
    name = listed([rank], names)
    if isinstance(error, UserError):
        return FailureReport((rank,), f"{name}: {error}", code=2, raised=True)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return FailureReport((rank,), f"{name} ended with exit code {code}", code=code, raised=True)
    return FailureReport((rank,), f"{name} failed: {traceback.format_exception_only(error)[-1].strip()}", raised=True)


def line_of(frame: FrameType | None) -> str:
    """`all_reduce (distributed_c10d.py:2987) of measure (loop.py:180)`: the innermost call, and this package's."""
    if frame is None:
        return ""
    ours: FrameType | None = frame
    while ours is not None and not ours.f_code.co_filename.startswith(str(PACKAGE)):
        ours = ours.f_back
    frames = [frame] if ours is None or ours is frame else [frame, ours]
    return " of ".join(f"{f.f_code.co_name} ({Path(f.f_code.co_filename).name}:{f.f_lineno})" for f in frames)


def end(verdict: FailureReport, rank: int, main: int) -> None:
    """Tell the verdict and end this process; the main thread may be inside an operation that nothing interrupts."""
    # whoever holds the log's lock may be stuck too
    teller = threading.Thread(target=_tell, args=(verdict, rank, main), daemon=True)
    teller.start()
    teller.join(TELLING)
    os._exit(verdict.code)


def _tell(verdict: FailureReport, rank: int, main: int) -> None:
    frame = sys._current_frames().get(main)
    log.error("%s; rank %d ends", verdict.text, rank)
    if rank in verdict.ranks and frame is not None:
        log.error("rank %d is at:\n%s", rank, "".join(traceback.format_stack(frame)).rstrip())
    for handler in log.handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
