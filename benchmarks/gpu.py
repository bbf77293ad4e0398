"""The first hour on a GPU: everything that this repository wants to know of an H100 or H200, in order of worth.

    python benchmarks/gpu.py [--minutes 30] [--from RUNG] [--only RUNG] [--list]     # make gpu ARGS="--from operators"
    python benchmarks/gpu.py --rehearse                       # every rung on the CPU, at tiny shapes

Each rung is a process of its own with a time limit, and writes benchmarks/results/gpu-<device>/<rung>.json as it gets
its results, so a stop at any moment loses nothing. A rung that fails records its error, and the next one begins. In the
end, the tables of benchmarks/README.md are written from these files.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# depthlm need not be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import reporting
from depthlm.files import read_json, replace_text

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
MINUTES = 30.0
# seconds that a process has to end after SIGTERM, before it is killed
GRACE = 5.0
# the tables of README.md that a GPU measures
MARKED = re.compile(r"(<!-- gpu -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Nothing has been measured on a GPU yet."
# lines of a rung's output that its JSON keeps if it failed
TAIL = 30


class Stopped(Exception):
    """A signal asks the command to stop."""


@dataclass(frozen=True)
class Rung:
    """A measurement, as first_hour/rungs.yaml describes it."""

    name: str
    question: str
    minutes: float
    script: str
    arguments: str
    rehearsal: str
    packages: Sequence[str] = ()

    def lacks(self) -> str | None:
        """Return why the rung cannot run, or None."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"packages that are not installed: {', '.join(missing)}" if missing else None


RUNGS = tuple(Rung(**rung) for rung in yaml.safe_load((BENCHMARKS / "first_hour" / "rungs.yaml").read_text()))


def environment(rehearse: bool) -> dict[str, str]:
    """Return the environment variables of a rung."""
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"}
    given = [path] if (path := os.environ.get("PYTHONPATH")) else []
    settings["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *given])
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & settings.keys():
        # as in train.py: without it, fragmentation wastes several GiB
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # Triton's interpreter would take the place of the GPU
    settings.pop("TRITON_INTERPRET", None)
    if rehearse:
        settings |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return settings


def run_rung(rung: Rung, folder: Path, rehearse: bool, seconds: float) -> dict[str, Any]:
    """Run a rung for at most so many seconds, and return its record: status, seconds, error. Raises Stopped."""
    if reason := rung.lacks():
        return {"status": "skipped", "error": reason}
    result, log = folder / f"{rung.name}.json", folder / f"{rung.name}.log"
    result.unlink(missing_ok=True)
    (REPOSITORY / "outputs").mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="first-hour-", dir=REPOSITORY / "outputs"))
    arguments = [word.format(scratch=scratch) for word in (rung.rehearsal if rehearse else rung.arguments).split()]
    command = [sys.executable, str(BENCHMARKS / rung.script), *arguments, "--output", str(result)]
    started = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(rehearse),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(timeout=seconds)
        status = "passed" if code == 0 else f"failed with exit status {code}"
    except subprocess.TimeoutExpired:
        status = f"stopped after its limit of {seconds:.0f} s"
    except Stopped:
        status = "interrupted"
    finally:
        end(process)
        shutil.rmtree(scratch, ignore_errors=True)
    record = {"status": status, "seconds": round(time.monotonic() - started, 1), "command": command[1:]}
    if status != "passed":
        record["error"] = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
    return record


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which would keep memory of the GPU."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)


def climb(rungs: Sequence[Rung], folder: Path, deadline: float, rehearse: bool) -> tuple[list[str], str | None]:
    """Run the rungs in turn. Return the names of those that failed, and that of the first one that was not finished.

    deadline: on the clock of `time.monotonic`.

    A rung whose limit exceeds the time that is left is not started; only the first one is, for the time that is left.
    """
    failed: list[str] = []
    for number, rung in enumerate(rungs):
        left = deadline - time.monotonic()
        limit = min(60 * rung.minutes, left) if number == 0 else 60 * rung.minutes
        if limit > left:
            return failed, rung.name
        print(f"{number + 1}/{len(rungs)} {rung.name}: {rung.question}", flush=True)
        try:
            outcome = run_rung(rung, folder, rehearse, limit)
        except Stopped:
            return failed, rung.name
        file = folder / f"{rung.name}.json"
        # beside the results that the rung has written
        replace_text(file, json.dumps({"rung": outcome, **read_json(file)}, indent=1) + "\n")
        duration = f" in {outcome['seconds']:.0f} s" if "seconds" in outcome else ""
        print(f"    {outcome['status']}{duration}", flush=True)
        if outcome["status"] == "interrupted":
            return failed, rung.name
        if outcome["status"] == "skipped":
            print(f"    {outcome['error']}")
        elif outcome["status"] != "passed":
            failed.append(rung.name)
            print(f"    {outcome['error'].rpartition(chr(10))[2]}")
            print(f"    its output: {folder / f'{rung.name}.log'}")
    return failed, None


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
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="start no rung that takes longer (default: %(default)g)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", choices=names, metavar="RUNG", help="begin with this rung (--list)")
    which.add_argument("--only", nargs="+", choices=names, metavar="RUNG", help="run only these rungs")
    parser.add_argument("--list", action="store_true", help="print the rungs and their limits")
    parser.add_argument("--rehearse", action="store_true", help="run every rung on the CPU at tiny shapes")
    parser.add_argument("--output", type=Path, help="folder for the results and a copy of README.md")
    parser.add_argument("--tables", action="store_true", help="only write the tables of README.md")
    arguments = parser.parse_args()
    if not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g}: must be above 0")
    if arguments.list:
        for rung in RUNGS:
            print(f"{rung.name:<12}{rung.minutes:>4g} min  {rung.question}")
        return 0
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    failed, unfinished = climb(chosen, folder, started + 60 * arguments.minutes, arguments.rehearse)
    filled = write_tables(readme, results)
    print(f"results: {folder}")
    if unfinished:
        print(f'to continue: make gpu ARGS="--from {unfinished}"')
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed) or filled != 0)


if __name__ == "__main__":
    sys.exit(main())
