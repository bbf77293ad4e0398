"""`depthlm submit experiment=... [key=value ...] [slurm.key=value ...]`: a sweep as one SLURM job array.

The overrides are those of `train.py -m`, and so are the points. Code and configuration are copied first: later changes
do not reach jobs that wait. The same command again submits what is neither complete nor queued.

    depthlm submit experiment=depth_attention/scaling slurm.nodes=4 slurm.throttle=4
    depthlm submit --status experiment=depth_attention/scaling
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from depthlm.config.arguments import described
from depthlm.errors import UserError
from depthlm.runs.records import COMPLETE, FAILED, WAITING, read_run
from depthlm.slurm.cluster import SETTINGS, Cluster, read_cluster
from depthlm.slurm.jobs import max_array_size, queued_points, remember_jobs, submitted
from depthlm.slurm.snapshot import next_snapshot, take_snapshot
from depthlm.sweeps import Point, check_points
from depthlm.sweeps.table import print_points

HERE = Path(__file__).resolve().parent


def main(arguments: list[str], program: str) -> None:
    """Submit a sweep, or show how far it is."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        epilog=f"keys of slurm., whose defaults {SETTINGS} below the current folder may change:\n{described(Cluster)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="as for train.py -m; slurm.key=value")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and submit nothing")
    parser.add_argument("--status", action="store_true", help="show the points instead: waiting, running, done, failed")
    parser.add_argument("--config-dir", help="a folder of configuration files besides conf/")
    parsed = parser.parse_intermixed_args(arguments)
    mine = [text.removeprefix("slurm.") for text in parsed.overrides if text.startswith("slurm.")]
    overrides = [text for text in parsed.overrides if not text.startswith("slurm.")]
    if parsed.status:
        status(overrides, parsed.config_dir)
    else:
        submit(overrides, mine, parsed.config_dir, parsed.dry_run)


def status(overrides: list[str], config_dir: str | None) -> None:
    """Print a line a point."""
    points = check_points(overrides, config_dir, here=False)
    folders = [sweep_folder(point) for point in points]
    known = queued_points(folders)
    for directory in submitted(folders) - known.keys():
        if read_run(directory).state == WAITING:
            # its job has ended without a run: its log tells why
            known[directory] = FAILED
    print_points(points, known)


def submit(overrides: list[str], mine: list[str], config_dir: str | None, dry_run: bool) -> None:
    """Submit every point that is neither complete nor queued."""
    cluster = read_cluster(mine)
    every = check_points(overrides, config_dir, here=False)
    directories = {point.directory: point for point in every}
    queued = queued_points([sweep_folder(point) for point in every])
    wanted = {
        directory: point
        for directory, point in directories.items()
        if directory not in queued and read_run(directory).state != COMPLETE
    }
    held = {d for d, point in wanted.items() if any(start in queued for start in starts(point))}
    if held:
        print(f"{len(held)} points start from runs that have a job: submit them once those are complete")
        wanted = {directory: point for directory, point in wanted.items() if directory not in held}
    left = f" ({len(every) - len(wanted)} more are complete, or have a job)" if len(wanted) < len(every) else ""
    print(f"{len(wanted)} points to train{left}")
    if not wanted:
        return
    waves = in_order(wanted)
    snapshot = next_snapshot(sweep_folder(every[0]))
    lines = [line(wanted[directory]) for wave in waves for directory in wave]
    if dry_run:
        print("\n".join(f"{number:4}  {text}" for number, text in enumerate(lines)))
    else:
        take_snapshot(snapshot, lines)
    before: list[str] = []
    offset = 0
    for wave in waves:
        jobs = []
        for part in parts(wave, max_array_size()):
            jobs.append(send(cluster, snapshot, offset, len(part), before, dry_run))
            if not dry_run:
                remember_jobs(snapshot, jobs[-1], part)
            offset += len(part)
        before = jobs
    if dry_run:
        print("\n# sweep.sbatch\n" + (HERE / "sweep.sbatch").read_text())
        print("# train.sbatch\n" + (HERE / "train.sbatch").read_text())


def in_order(points: dict[str, Point]) -> list[list[str]]:
    """Run directories in waves: each starts only from runs of earlier ones, or of none that is to be trained."""
    waves: dict[str, int] = {}
    for directory, point in points.items():
        waves[directory] = max((waves[start] + 1 for start in starts(point) if start in waves), default=0)
    return [[d for d, wave in waves.items() if wave == number] for number in range(max(waves.values()) + 1)]


def starts(point: Point) -> list[str]:
    """The runs that a point starts from."""
    return [text.partition("=")[2] for text in point.overrides if text.startswith(("import_from=", "fork_from="))]


def line(point: Point) -> str:
    """The arguments of train.py, as a shell reads them."""
    flags = [] if point.config_dir is None else ["--config-dir", str(Path(point.config_dir).resolve())]
    return shlex.join([*flags, *point.overrides])


def parts(directories: list[str], most: int) -> list[list[str]]:
    """A list in parts: a cluster refuses arrays that are larger."""
    return [directories[start : start + most] for start in range(0, len(directories), most)]


def send(cluster: Cluster, snapshot: Path, offset: int, size: int, after: Sequence[str], dry_run: bool) -> str:
    """Submit one job array; returns its number. Raises UserError with sbatch's words."""
    throttle = f"%{cluster.throttle}" if cluster.throttle else ""
    variables = {
        "DEPTHLM_SWEEP": str(snapshot), "DEPTHLM_OFFSET": str(offset), "DEPTHLM_PYTHON": sys.executable,
        "DEPTHLM_SETUP": cluster.setup,
    }  # fmt: skip
    command = [
        "sbatch", "--parsable", f"--array=0-{size - 1}{throttle}", f"--job-name={snapshot.parent.parent.name}",
        f"--output={snapshot}/log-%A_%a.txt", "--requeue", "--open-mode=append", *cluster.options(),
        *([f"--dependency=afterany:{':'.join(after)}"] if after else []), str(HERE / "sweep.sbatch"),
    ]  # fmt: skip
    if dry_run:
        print("\n" + " ".join([*(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(command)]))
        return "<the job above>"
    try:
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("sbatch: no such command; submit on a machine of the cluster") from None
    if done.returncode:
        raise UserError(f"sbatch: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    print(f"job {job}: {size} points, logs in {snapshot}")
    return job


def sweep_folder(point: Point) -> Path:
    """Where what is submitted of a point's experiment is kept."""
    return Path(point.directory).parent / ".slurm"
