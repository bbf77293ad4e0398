"""Sweeps on a SLURM cluster of two nodes: running, status, failure, requeueing and repeated submission."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..forks import Forks, environment_with

Submit = Callable[..., str]
ONE_RANK = ["slurm.gpus_per_node=0", "slurm.cpus_per_task=1", "slurm.time=00:20:00"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def submit(cluster: dict[str, str], forks: Forks) -> Submit:
    """Run slurm/submit.py on the cluster, with these variables of the environment, and return its output."""

    def run(*arguments: str, **more: str) -> str:
        done = forks.run(["slurm/submit.py", *arguments], environment=environment_with(**cluster, **more))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def run(cluster: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment_with(**cluster))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.3)


def wait_for_jobs(cluster: dict[str, str], seconds: float) -> None:
    wait_until(lambda: not run(cluster, "squeue", "--noheader").strip(), seconds, "the queue is empty")


@pytest.mark.release
def test_an_array_of_four_points_over_two_nodes(cluster, submit, four_points, tmp_path):
    # each point takes all cores of a node
    output = submit(*four_points, *ONE_RANK, "slurm.cpus_per_task=2", "slurm.throttle=2")
    assert "4 points to train" in output
    wait_for_jobs(cluster, 300)
    nodes = re.findall(r" NodeList=(\S+)", run(cluster, "scontrol", "--oneliner", "show", "job"))
    assert {"n1", "n2"} <= {*nodes}
    for name in ("vanilla", "denseformer"):
        for lr in ("0.001", "0.002"):
            directory = tmp_path / "runs" / f"{name}-{lr}"
            assert json.loads((directory / "summary.json").read_text())["steps"] == 20
            environment = json.loads((directory / "environment.json").read_text())
            assert (environment["launcher"], environment["world_size"], environment["nodes"]) == ("srun", 1, 1)
            assert environment["code"] == str(tmp_path / "runs/.slurm/0001/code")
    status = submit("--status", *four_points)
    assert "4 points: 4 complete" in status
    assert "0 points to train" in submit(*four_points, *ONE_RANK)


def test_a_failed_point_is_reported_and_only_it_is_submitted_again(cluster, submit, small_run, tmp_path):
    (tmp_path / "fragile.py").write_text(
        """from pathlib import Path
from depthlm.mechanisms.residual import Residual

class Fragile(Residual):
    def read(self, stream):
        if not (Path(__file__).parent / "fixed").exists():
            raise RuntimeError("this mechanism is broken")
        return super().read(stream)
"""
    )
    kept = [text for text in small_run() if not text.startswith("output_dir=")]
    sweep = [
        *kept,
        "model.connection._target_=depthlm.mechanisms.residual.Residual,fragile.Fragile",
        f"output_dir={tmp_path}/runs/${{model.connection._target_}}",
    ]
    path = {"PYTHONPATH": str(tmp_path)}
    assert "2 points to train" in submit(*sweep, *ONE_RANK, **path)
    wait_for_jobs(cluster, 200)
    status = submit("--status", *sweep, **path)
    assert "2 points: 1 complete, 1 failed" in status
    assert "RuntimeError: this mechanism is broken" in status
    (tmp_path / "fixed").touch()
    again = submit(*sweep, *ONE_RANK, **path)
    assert "1 points to train (1 more are complete, or have a job)" in again
    wait_for_jobs(cluster, 200)
    assert "2 points: 2 complete" in submit("--status", *sweep, **path)


@pytest.mark.parametrize(
    "event", ["signalled", *(pytest.param(event, marks=pytest.mark.release) for event in ("timed out", "preempted"))]
)
def test_every_point_of_an_array_that_is_stopped_saves_is_requeued_and_resumes(
    event, cluster, submit, small_run, tmp_path
):
    kept = [
        text for text in small_run("training.max_steps=1000000", "training.log_every=10") if "output_dir=" not in text
    ]
    sweep = [*kept, "seed=1,2", f"output_dir={tmp_path}/runs/${{seed}}"]
    limit = {"timed out": ["slurm.time=00:01:00", "slurm.signal_seconds=25"], "signalled": ["slurm.nodes=2"]}
    assert "2 points to train" in submit(*sweep, *ONE_RANK, "slurm.cpus_per_task=2", *limit.get(event, []))
    runs = [tmp_path / "runs" / seed for seed in ("1", "2")]
    wait_until(lambda: all(last_step(directory) > 20 for directory in runs), 120, "a few steps")
    environment = json.loads((runs[0] / "environment.json").read_text())
    nodes = 2 if event == "signalled" else 1
    assert (environment["launcher"], environment["world_size"], environment["nodes"]) == ("srun", nodes, nodes)
    (array,) = {*run(cluster, "squeue", "--noheader", "--array", "--format=%F").split()}
    if event == "signalled":
        # signal only the batch scripts, as SLURM does before the time limit; they forward the signal to the ranks
        run(cluster, "scancel", "--batch", "--signal=USR1", f"{array}_0", f"{array}_1")
    elif event == "preempted":
        urgent = ["--partition=urgent", "--nodes=2", "--ntasks=2", "--cpus-per-task=2", "--output=/dev/null"]
        run(cluster, "sbatch", *urgent, "--wrap", "srun sleep 5")
    wait_until(lambda: {*states(cluster, array)} == {"PENDING"}, 150, "both points are queued again")
    saved = [last_step(directory) for directory in runs]
    # a second submission does not submit them again
    assert "0 points to train" in submit(*sweep, *ONE_RANK)
    assert "2 waiting" in submit("--status", *sweep)
    for directory, step in zip(runs, saved, strict=True):
        log = directory / "train.log"
        # on a busy machine, the limit may stop one point a second time while the other one is waited for
        wait_until(lambda log=log: log.read_text().count("started by srun") >= 2, 300, "the job runs again")
        wait_until(lambda at=step, run=directory: last_step(run) > at, 120, "the run resumes")
        assert f"step-{step:08d}" in log.read_text().split("started by srun")[2]
    # a cancelled job also saves, and is not requeued
    run(cluster, "scancel", array)
    wait_for_jobs(cluster, 60)
    assert "2 stopped" in submit("--status", *sweep)


def last_step(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def states(cluster: dict[str, str], array: str) -> list[str]:
    return run(cluster, "squeue", "--noheader", "--array", f"--jobs={array}", "--format=%T").split()
