"""`depthlm submit experiment=... [key=value ...] [slurm.key=value ...]`: submit a sweep as one SLURM job array.

The overrides and points are those of `train.py -m`. Code and configuration are copied first, so that later changes do
not affect waiting jobs. Repeating the command submits the points that are neither complete nor queued.

    depthlm submit experiment=depth_attention/scaling slurm.nodes=4 slurm.throttle=4
    depthlm submit --status experiment=depth_attention/scaling
"""

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from depthlm.config.arguments import describe_keys
from depthlm.config.saved import config_text
from depthlm.errors import UserError
from depthlm.files import open_appending
from depthlm.locations import CONF, IS_CHECKOUT, PACKAGE, REPOSITORY
from depthlm.machine.environment import git_state
from depthlm.runs.records import FAILED, WAITING, read_run
from depthlm.slurm.cluster import (
    SETTINGS,
    Cluster,
    job_logs,
    max_array_size,
    queued_points,
    read_cluster,
    record_array,
)
from depthlm.sweeps import Point, check_points
from depthlm.sweeps.best import find_undecided, is_done, undecided_text
from depthlm.sweeps.table import print_points

FOLDER = Path(__file__).resolve().parent


class RejectedError(UserError):
    """A job that SLURM did not accept."""


def main(arguments: list[str], program: str) -> None:
    """Submit a sweep, or show the state of its points."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        epilog="keys of slurm., with defaults that "
        f"{SETTINGS} in the current folder can change:\n{describe_keys(Cluster)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="as for train.py -m; slurm.key=value")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be submitted, and what would be refused"
    )
    parser.add_argument("--status", action="store_true", help="show the state of every point instead")
    parser.add_argument("--config-dir", help="a folder of additional configuration files")
    parsed = parser.parse_intermixed_args(arguments)
    cluster_overrides = [text.removeprefix("slurm.") for text in parsed.overrides if text.startswith("slurm.")]
    overrides = [text for text in parsed.overrides if not text.startswith("slurm.")]
    if parsed.status:
        status(overrides, parsed.config_dir)
        return
    cluster = read_cluster(cluster_overrides)
    points = check_points(overrides, parsed.config_dir, here=False)
    with ExitStack() as locks:
        # without them, a second command would submit the same points, because it would not see the jobs of this one
        for folder in [] if parsed.dry_run else sorted({*map(sweep_folder, points)}):
            locks.enter_context(lock_sweeps(folder))
        submit(points, cluster, parsed.dry_run)


def status(overrides: list[str], config_dir: str | None) -> None:
    """Print one line per point."""
    points = check_points(overrides, config_dir, here=False)
    jobs = jobs_of(points)
    for directory, log in job_logs(map(sweep_folder, points)).items():
        if directory not in jobs and read_run(directory).state == WAITING:
            jobs[directory] = FAILED, f"the job ended before its run began; see {log}"
    print_points(points, jobs)


def submit(points: list[Point], cluster: Cluster, dry_run: bool) -> None:
    """Submit every point that is neither done nor queued, from a snapshot in the folder of the first one.

    The folders of all points record their jobs, since a later command may have only some of the points.
    """
    queued = jobs_of(points)
    to_train = {point.directory: point for point in points if point.directory not in queued and not is_done(point)}
    deferred: set[str] = set()
    while more := {d for d, p in to_train.items() if any(s in queued or s in deferred for s in p.starts)} - deferred:
        deferred |= more
    if deferred:
        print(f"{len(deferred)} points start from runs that have a job, or from others that do; submit them later")
        to_train = {directory: point for directory, point in to_train.items() if directory not in deferred}
    others = len(points) - len(to_train)
    print(f"{len(to_train)} points to train{f' ({others} more are complete, or have a job)' if others else ''}")
    if groups := [group for group in find_undecided(points) if group.waits]:
        print(f"{undecided_text(groups)}; repeat this command when these runs are complete, to submit the rest")
    if not to_train:
        return
    refused = check(list(to_train.values()), cluster, dry_run)
    waves = group_into_waves(to_train)
    records = {folder: next_snapshot(folder) for folder in {*map(sweep_folder, points)}}
    snapshot = records[sweep_folder(points[0])]
    ordered = [to_train[directory] for wave in waves for directory in wave]
    if dry_run:
        print("\n".join(f"{number:4}  {point_command(point)}" for number, point in enumerate(ordered)))
    else:
        take_snapshot(snapshot, ordered)
    previous_jobs: list[str] = []
    offset, size = 0, max_array_size()
    try:
        for wave in waves:
            jobs: list[str] = []
            for part in (wave[start : start + size] for start in range(0, len(wave), size)):
                # with a throttle, the parts follow one another: it holds for one array
                after = jobs[-1:] if cluster.throttle and jobs else previous_jobs
                jobs.append(submit_array(cluster, snapshot, offset, len(part), after, dry_run))
                for folder in () if dry_run else {sweep_folder(to_train[directory]) for directory in part}:
                    record_array(records[folder], jobs[-1], part, snapshot)
                offset += len(part)
            previous_jobs = jobs
    except RejectedError:
        if offset == 0:
            shutil.rmtree(snapshot, ignore_errors=True)
        raise
    if dry_run:
        print("\n# sweep.sbatch\n" + (FOLDER / "sweep.sbatch").read_text())
        print("# train.sbatch\n" + (FOLDER / "train.sbatch").read_text())
    if refused is not None:
        raise refused


def jobs_of(points: Sequence[Point]) -> dict[str, tuple[str, str]]:
    """Return the jobs of the points that are not done; that of one that is done is about to end."""
    jobs = queued_points(map(sweep_folder, points))
    done = {point.directory for point in points if point.directory in jobs and is_done(point)}
    return {directory: job for directory, job in jobs.items() if directory not in done}


def check(points: list[Point], cluster: Cluster, dry_run: bool) -> UserError | None:
    """Print what is known of the memory. Raises UserError for what training would refuse; a dry run returns it."""
    # this module imports torch
    from depthlm.slurm.start import check_start, memory_note

    refused: UserError | None = None
    try:
        check_start(points, cluster)
    except UserError as error:
        if not dry_run:
            raise
        refused = error
    if cluster.memory_per_rank() is None:
        known_by = "gpu_memory=<GB>" if cluster.gpus_per_node else "mem=<memory per node>"
        print(f"memory is not checked; slurm.{known_by} checks that each point fits")
        if cluster.gpus_per_node:
            print(memory_note(points, cluster))
    return refused


def group_into_waves(points: dict[str, Point]) -> list[list[str]]:
    """Group run directories into waves, such that each run starts only from runs of earlier waves."""
    waves: dict[str, int] = {}
    for directory, point in points.items():
        waves[directory] = max((waves[start] + 1 for start in point.starts if start in waves), default=0)
    return [[d for d, wave in waves.items() if wave == number] for number in range(max(waves.values()) + 1)]


def point_command(point: Point) -> str:
    """Return the command of a point, quoted for bash."""
    flags = [] if point.config_dir is None else ["--config-dir", str(Path(point.config_dir).resolve())]
    return shlex.join(["train.py", *flags, *point.overrides])


def job_config_text(point: Point) -> str:
    """Return the resolved configuration of a point as its job reads it: with the points that it starts from."""
    starts = {name: value for name, value in point.settings.items() if value.startswith("@")}
    experiment = replace(point.config.experiment, points=[starts] if starts else [])
    # the directory is new at the submission, and not when the job is requeued
    resume = "auto" if point.config.resume == "never" else point.config.resume
    return config_text(replace(point.config, experiment=experiment, resume=resume))


def submit_array(cluster: Cluster, snapshot: Path, offset: int, size: int, after: Sequence[str], dry_run: bool) -> str:
    """Submit one job array and return its job id. Raises UserError with the message of sbatch."""
    throttle = f"%{cluster.throttle}" if cluster.throttle else ""
    variables = {
        "DEPTHLM_SWEEP": str(snapshot),
        "DEPTHLM_OFFSET": str(offset),
        "DEPTHLM_PYTHON": sys.executable,
        "DEPTHLM_SETUP": cluster.setup,
    }
    command = [
        "sbatch",
        "--parsable",
        f"--array=0-{size - 1}{throttle}",
        f"--job-name={snapshot.parent.parent.name}",
        # SLURM replaces %j in a path
        f"--output={str(snapshot).replace('%', '%%')}/log-%A_%a.txt",
        "--requeue",
        "--open-mode=append",
        *cluster.options(),
        *([f"--dependency=afterany:{':'.join(after)}"] if after else []),
        str(FOLDER / "sweep.sbatch"),
    ]
    if dry_run:
        print("\n" + " ".join([*(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(command)]))
        return "<the job above>"
    try:
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise RejectedError("sbatch: no such command; submit on a machine of the cluster") from None
    if done.returncode:
        raise RejectedError(f"sbatch: {done.stderr.strip()}")
    # the job's id, followed by the name of the cluster if there are several; some clusters print a banner as well
    ids = re.findall(r"^(\d+)(?:;.*)?$", done.stdout, flags=re.MULTILINE)
    if len(ids) != 1:
        raise UserError(
            f"sbatch has submitted a job but printed no id of it: {done.stdout.strip()!r}. `squeue --me` lists it; "
            "cancel it before you submit the sweep again"
        )
    (job,) = ids
    print(f"job {job}: {size} points, logs in {snapshot}")
    return job


def sweep_folder(point: Point) -> Path:
    """Return the folder that contains the submissions of a point's experiment."""
    return Path(point.directory).parent / ".slurm"


def next_snapshot(folder: Path) -> Path:
    """Return the folder of the next submission: 0001, 0002, ..."""
    numbers = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]
    return folder.absolute() / f"{max(numbers, default=0) + 1:04d}"


def take_snapshot(snapshot: Path, points: Sequence[Point]) -> None:
    """Copy the code, and write the configuration of each point beside it.

    From a git checkout, copy tracked files and new files that git does not ignore; otherwise, copy the installed
    package. Raises UserError if the folder exists or the files cannot be written.
    """
    try:
        snapshot.mkdir(parents=True)
        for name in _files():
            target = snapshot / "code" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target)
        (snapshot / "code" / "git.json").write_text(json.dumps(git_state()) + "\n")
        (snapshot / "points").mkdir()
        for number, point in enumerate(points):
            (snapshot / f"points/{number}.yaml").write_text(job_config_text(point), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{snapshot}: the code cannot be copied there ({error})") from None


@contextmanager
def lock_sweeps(folder: Path) -> Iterator[None]:
    """Wait until no other process submits a sweep from this folder. Raises UserError if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_appending(folder / "lock")
    except OSError as error:
        raise UserError(f"{folder}: cannot be created ({error})") from None
    with lock:
        # a file system without locks; `take_snapshot` still refuses a folder of another process
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _files() -> list[Path]:
    """Return every file of the code, relative to the checkout or to the folder of installed packages.

    In a git checkout, these are tracked files and new files that git does not ignore.
    """
    if IS_CHECKOUT and (REPOSITORY / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        with suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
            # git also lists deleted files
            return [Path(name) for name in done.stdout.split("\0") if (REPOSITORY / name).is_file()]
    folders = [PACKAGE, CONF]
    paths = (path for folder in folders for path in (folder, *folder.rglob("*")))
    files = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return list(dict.fromkeys(path.relative_to(REPOSITORY) for path in files))
