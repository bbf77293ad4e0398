"""Two ranks started by deepspeed's launcher and by srun; test_train.py uses torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from depthlm.locations import REPOSITORY

from ..forks import environment_with
from ..ranks import free_port
from .test_train import curve, wait_for_step

DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_worker_is_killed(small_run, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["--max-restarts=1", "train.py"]
    settings = small_run("training.max_steps=120", "training.checkpoint_every=20", "training.log_every=1")
    with subprocess.Popen([*command, *settings], cwd=REPOSITORY, env=environment_with()) as torchrun:
        wait_for_step(tmp_path / "run", 30, torchrun)
        psutil.Process(torchrun.pid).children()[-1].kill()
        assert torchrun.wait(timeout=200) == 0
    assert curve(tmp_path / "run").keys() == set(range(1, 121))
    assert "resumed from checkpoints/step-" in (tmp_path / "run/train.log").read_text()


@pytest.mark.slow
def test_deepspeeds_launcher_starts_two_ranks(small_run, tmp_path):
    command = [DEEPSPEED, "--num_gpus=2", f"--master_port={free_port()}", "train.py"]
    done = subprocess.run(
        [*command, *small_run("training.max_steps=2")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200, env=environment_with(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("started by deepspeed: 2 ranks on one node, rank 0 on cpu") == 1
    assert curve(tmp_path / "run").keys() == {1, 2}


@pytest.mark.slow
def test_srun_starts_two_ranks_that_find_each_other(small_run, tmp_path, forks):
    job = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    tasks = [
        forks.start(
            ["train.py", *small_run("training.max_steps=2")],
            environment=environment_with(**job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=200)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "started by srun: 2 ranks on one node, rank 0 on cpu" in outputs[0]
    assert "they meet at localhost:" in outputs[0]
    assert outputs[1] == ""
    assert curve(tmp_path / "run").keys() == {1, 2}
