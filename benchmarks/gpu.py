"""A quarter of an hour on a GPU: what this repository wants to know of an H100 or H200, in order of worth.

    python benchmarks/gpu.py [--part 1] [--minutes 7] [--from RUNG] [--only RUNG]    # make gpu ARGS="--part 1"
    python benchmarks/gpu.py --rehearse                       # every rung on the CPU, at tiny shapes

The rungs of part 1 ask whether everything is correct, and run side by side. Those of part 2 measure times, so each of
them has the machine to itself. Each part takes at most --minutes.

Each rung is a process of its own with a time limit, and writes benchmarks/results/gpu-<device>/<rung>.json as it gets
its results, so a stop at any moment loses nothing. A rung that fails records its error, and the next one begins. In the
end, the tables of benchmarks/README.md are written from these files.
"""

import argparse
import importlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# depthlm need not be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rungs.process import PARTS, RUNGS, SIDE_BY_SIDE, Rung, Running, environment, finish, start, write_record
from benchmarks.shared import reporting
from depthlm.files import read_json, replace_text

BENCHMARKS = Path(__file__).resolve().parent
# of a part
MINUTES = 7.0
# a rung is started if at least this share of its limit is left
WORTHWHILE = 0.5
# seconds between two looks at the processes
POLL = 0.1
# the tables of README.md that a GPU measures
MARKED = re.compile(r"(<!-- gpu -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Nothing has been measured on a GPU yet."


class Stopped(Exception):
    """A signal asks the command to stop."""


def climb(rungs: Sequence[Rung], folder: Path, deadline: float, rehearse: bool) -> tuple[list[str], str | None]:
    """Run the rungs of a part. Return the names of those that failed, and that of the first one that was not finished.

    deadline: on the clock of `time.monotonic`.

    Rungs of part 1 run side by side, the others in turn. A rung is not started if less than half of its limit is left;
    only the first one always is.
    """
    together = bool(rungs) and rungs[0].part == SIDE_BY_SIDE
    failed: list[str] = []
    for group in [rungs] if together else [[rung] for rung in rungs]:
        left = deadline - time.monotonic()
        if group[0] is not rungs[0] and left < WORTHWHILE * 60 * group[0].minutes:
            return failed, group[0].name
        for rung in group:
            print(f"{rung.name}: {rung.question}", flush=True)
        try:
            failed += run_together(group, folder, left, rehearse)
        except Stopped:
            return failed, group[0].name
    return failed, None


def run_together(rungs: Sequence[Rung], folder: Path, left: float, rehearse: bool) -> list[str]:
    """Run rungs side by side, for at most so many seconds. Return the names of those that failed. Raises Stopped."""
    failed: list[str] = []
    running: list[Running] = []
    try:
        for rung in rungs:
            if reason := rung.lacks():
                write_record(folder, rung.name, {"status": "skipped", "error": reason})
                print(f"    {rung.name}: skipped, {reason}", flush=True)
            else:
                running.append(start(rung, folder, rehearse, min(60 * rung.minutes, left)))
        while running:
            for each in list(running):
                if status := each.status():
                    finish(each, status)
                    running.remove(each)
                    failed += [] if status == "passed" else [each.rung.name]
            time.sleep(POLL)
    except Stopped:
        for each in running:
            finish(each, "interrupted")
        raise
    return failed


def device_name(parser: argparse.ArgumentParser) -> str:
    """Return the name of this machine's GPU, for a file name; ends the command if torch cannot use one."""
    # this process itself must not start CUDA, which takes memory of the GPU
    command = [sys.executable, "-c", "import torch; torch.ones(1).cuda(); print(torch.cuda.get_device_name())"]
    done = subprocess.run(command, env=environment(rehearse=False), capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["torch does not start"])[-1]
        parser.error(f"{reason}; without a GPU, give --rehearse")
    return done.stdout.strip().splitlines()[-1].replace(" ", "-").lower()


def fill(text: str, devices: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the text with its tables, and the errors. devices: by name of the folder, the results of each rung."""
    parts, errors = [], []
    for measured in devices.values():
        parts.append(outcomes(measured))
        for rung in RUNGS:
            results = measured.get(rung.name, {})
            # a rung that failed at once has no results, and the table of outcomes says why
            if "machine" not in results:
                continue
            module = f"benchmarks.{rung.script.removesuffix('.py').replace('/', '.')}"
            try:
                shown = importlib.import_module(module).markdown(results)
            except Exception as error:
                # a table that cannot be made must not cost the others
                errors.append(f"the table of {rung.name}: {type(error).__name__}: {error}")
            else:
                parts.append(f"`{rung.name}`, {rung.question}.\n\n{shown}")
    content = "\n\n".join(part for part in parts if part) or NOTHING
    return MARKED.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text), errors


def outcomes(measured: dict[str, Any]) -> str:
    """Return a table of the rungs of a device that have run."""
    ran = {name: results["rung"] for name, results in measured.items() if "rung" in results}
    if not ran:
        return ""
    device = next((x["machine"]["device"] for x in measured.values() if "machine" in x), "no rung had a result")
    order = [rung.name for rung in RUNGS if rung.name in ran]
    lines = ((name, ran[name]["status"], reporting.number(ran[name].get("seconds"), ",.0f")) for name in order)
    return f"{device}:\n\n{reporting.table(('rung', 'status', 'seconds'), lines)}"


def write_tables(readme: Path, results: Path) -> int:
    """Write the tables of all devices into the README, and return an exit status. A broken file counts as missing."""
    devices: dict[str, dict[str, Any]] = {}
    for folder in sorted(results.glob("gpu-*")):
        read = {rung.name: read_json(folder / f"{rung.name}.json") for rung in RUNGS}
        devices[folder.name] = {name: measured for name, measured in read.items() if measured}
    text, errors = fill(readme.read_text(), devices)
    replace_text(readme, text)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return int(bool(errors))


def stop(number: int, frame: object) -> None:
    # a second signal must not leave a rung running, or the tables half filled
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rung.name for rung in RUNGS]
    parser.add_argument("--part", type=int, choices=PARTS, help="1: correctness; 2: times (default: both)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of each part, at most (default: %(default)g)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", choices=names, metavar="RUNG", help="begin with this rung")
    which.add_argument("--only", nargs="+", choices=names, metavar="RUNG", help="run only these rungs")
    parser.add_argument("--rehearse", action="store_true", help="run every rung on the CPU at tiny shapes")
    parser.add_argument("--output", type=Path, help="folder for the results and a copy of README.md")
    parser.add_argument("--tables", action="store_true", help="only write the tables of README.md")
    arguments = parser.parse_args()
    if not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g}: must be above 0")
    readme, results = BENCHMARKS / "README.md", BENCHMARKS / "results"
    if arguments.tables:
        return write_tables(readme, results)
    name = "gpu-rehearsal" if arguments.rehearse else f"gpu-{device_name(parser)}"
    if arguments.output or arguments.rehearse:
        # the README and the results of the repository are those of real devices
        results = (arguments.output or Path(tempfile.mkdtemp(prefix="depthlm-rehearsal-"))).resolve()
        results.mkdir(parents=True, exist_ok=True)
        readme = Path(shutil.copy(readme, results / "README.md"))
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    chosen = RUNGS[names.index(arguments.first) if arguments.first else 0 :]
    if arguments.only:
        chosen = tuple(rung for rung in RUNGS if rung.name in arguments.only)
    parts = [arguments.part] if arguments.part else PARTS
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    failed: list[str] = []
    unfinished: str | None = None
    for part in parts:
        rungs = [rung for rung in chosen if rung.part == part]
        failures, unfinished = climb(rungs, folder, started + 60 * arguments.minutes, arguments.rehearse)
        failed += failures
        if unfinished:
            break
        started = time.monotonic()
    filled = write_tables(readme, results)
    print(f"results: {folder}")
    if unfinished:
        print(f'to continue: make gpu ARGS="--from {unfinished}"')
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed) or filled != 0)


if __name__ == "__main__":
    sys.exit(main())
