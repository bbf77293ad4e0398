"""Report why a rank fails, and end this process when another rank has failed."""

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

LOG_SECONDS = 5.0


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception is only the consequence of another rank's end."""
    if isinstance(error, (DistError, Rank0Error)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(
        text in message for text in ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )


def last_words(error: BaseException, rank: int, names: dict[int, str]) -> FailureReport:
    """Return the failure report of an exception for the other ranks."""
    name = listed([rank], names)
    if isinstance(error, UserError):
        return FailureReport((rank,), f"{name}: {error}", code=2, raised=True)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return FailureReport((rank,), f"{name} ended with exit code {code}", code=code, raised=True)
    return FailureReport((rank,), f"{name} failed: {traceback.format_exception_only(error)[-1].strip()}", raised=True)


def line_of(frame: FrameType | None) -> str:
    """Name the innermost call and ours: `all_reduce (distributed_c10d.py:2987) of train_step (step.py:38)`."""
    if frame is None:
        return ""
    own: FrameType | None = frame
    while own is not None and not own.f_code.co_filename.startswith(str(PACKAGE)):
        own = own.f_back
    frames = [frame] if own is None or own is frame else [frame, own]
    return " of ".join(f"{f.f_code.co_name} ({Path(f.f_code.co_filename).name}:{f.f_lineno})" for f in frames)


def end(report: FailureReport, rank: int, main: int) -> None:
    """Log the failure report and end this process, even if the main thread is in an uninterruptible operation."""
    # the thread that holds the lock of the log may be stuck too
    log_thread = threading.Thread(target=_log_report, args=(report, rank, main), daemon=True)
    log_thread.start()
    log_thread.join(LOG_SECONDS)
    os._exit(report.code)


def _log_report(report: FailureReport, rank: int, main: int) -> None:
    frame = sys._current_frames().get(main)
    log.error("%s; rank %d ends", report.text, rank)
    if rank in report.ranks and frame is not None:
        log.error("rank %d is at:\n%s", rank, "".join(traceback.format_stack(frame)).rstrip())
    for handler in log.handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
