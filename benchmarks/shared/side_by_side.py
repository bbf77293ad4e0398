"""Lines of a table that are checked in several processes at once. Nothing may be timed there."""

import multiprocessing
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.shared.interleaved import release
from benchmarks.shared.reporting import Results, error_text, write_json

Line = dict[str, Any]
# a line, and what returns the rest of it
Job = tuple[Line, Callable[[], Line]]


def check_lines(jobs: Iterable[Job], results: Results, output: Path, processes: int) -> None:
    """Measure lines of a table as `interleaved.measure_lines` does, each in one of so many processes.

    The functions must be picklable. A process whose line fails is replaced, since an error of a GPU lasts as long as
    the process.
    """
    waiting, lock = enumerate(list(jobs)), threading.Lock()
    lines: dict[int, Line] = {}
    results["lines"] = []

    def take_jobs(_: int) -> None:
        pool: ProcessPoolExecutor | None = None
        while True:
            with lock:
                taken = next(waiting, None)
            if taken is None:
                break
            number, (line, job) = taken
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            try:
                line = line | pool.submit(attempt, job).result()
            except Exception as error:
                # the process has died
                line = line | {"error": error_text(error)}
            with lock:
                lines[number] = line
                results["lines"] = [lines[n] for n in sorted(lines)]
                write_json(output, results)
                print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            if "error" in line:
                pool.shutdown()
                pool = None
        if pool is not None:
            pool.shutdown()

    with ThreadPoolExecutor(processes) as threads:
        list(threads.map(take_jobs, range(processes)))


def attempt(job: Callable[[], Line]) -> Line:
    """Return the results of a job, or its error, which need not be picklable."""
    try:
        return job()
    except Exception as error:
        traceback.print_exc()
        return {"error": error_text(error)}
    finally:
        release()
