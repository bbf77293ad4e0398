"""Ranks are read from the variables of every launcher, and inconsistent variables are refused."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthlm.distributed import launchers
from depthlm.distributed.launchers import (
    SINGLE_RANK,
    Ranks,
    device_index,
    first_host,
    ranks,
    set_deepspeed_variables,
)
from depthlm.errors import UserError

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "gpu-1", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8",
    "SLURM_STEP_NODELIST": "gpu-[003-004]", "SLURM_JOB_NODELIST": "gpu-[003-010]", "SLURM_JOB_NUM_NODES": "8",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, SINGLE_RANK),
        (TORCHRUN, Ranks(3, 1, 4, 2, "torchrun", 2, "gpu-1", 29400)),
        (DEEPSPEED, Ranks(5, 1, 8, 4, "deepspeed", 2, "10.0.0.1", 29500)),
        (SRUN, Ranks(5, 1, 8, 4, "srun", 2, "gpu-003", 20000 + 4711 * 101 % 40000)),
        (SRUN | {"MASTER_ADDR": "ib-3", "MASTER_PORT": "777"}, Ranks(5, 1, 8, 4, "srun", 2, "ib-3", 777)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, Ranks(5, 1, 8, 3, "srun", 2, "gpu-003", 20000 + 475811 % 40000)),
        # one srun task per node, which starts torchrun
        (SRUN | TORCHRUN, Ranks(3, 1, 4, 2, "torchrun", 2, "gpu-1", 29400)),
        (BY_HAND, Ranks(1, 0, 2, 1, "variables set by hand", 2, "n1", 29500)),
        (SRUN | BY_HAND, Ranks(1, 1, 2, 2, "variables set by hand", 1, "n1", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, SINGLE_RANK),
        # a shell in an allocation or a batch script, which is not a task of a step
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}, SINGLE_RANK),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Ranks(0, 0, 1, 1, "srun")),
    ],
)
def test_ranks_come_from_any_launcher(environment, expected):
    assert ranks(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, ["RANK=0, but WORLD_SIZE is not set", "torchrun, deepspeed or srun"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2, but RANK is not set"]),
        (BY_HAND | {"RANK": "one"}, ["RANK=one: must be an integer of at least 0"]),
        (BY_HAND | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0: must be an integer of at least 1"]),
        (BY_HAND | {"RANK": "2"}, ["RANK=2, but WORLD_SIZE=2: ranks count from 0 to 1"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["2 ranks, but MASTER_ADDR and MASTER_PORT not set: export"]),
        (BY_HAND | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000: ports count from 1 to 65535"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "four"}, ["SLURM_STEP_TASKS_PER_NODE=four", "4(x2),3"]),
        (SRUN | {"SLURM_STEP_NODELIST": "n[1-2"}, ["'n[1-2'", "export MASTER_ADDR"]),
        (SRUN | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, ["names no host"]),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE=2", "mpirun"]),
    ],
)
def test_an_inconsistent_environment_is_refused_with_the_reason(environment, words):
    with pytest.raises(UserError) as caught:
        ranks(environment)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_first_host_of_a_node_list():
    for nodelist, host in (
        ("localhost", "localhost"),
        ("n[1-2,7],gpu-[003-010]", "n1"),
        ("gpu-[007,009]", "gpu-007"),
        ("rack[02-03]n[1-4],x", "rack02n1"),
        ("n[1-2]-ib.cluster.org", "n1-ib.cluster.org"),
    ):
        assert first_host(nodelist) == host


@given(st.integers(1, 2**31), st.integers(0, 1000))
def test_all_tasks_of_a_step_share_a_port_and_the_next_job_has_another(job, step):
    def port(job: int, rank: int) -> int | None:
        return ranks(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank)}).port

    assert 20000 <= (port(job, 0) or 0) < 60000
    assert port(job, 0) == port(job, 7)
    assert port(job, 0) != port(job + 1, 0)


def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_visible_one(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    third = Ranks(7, 3, 8, 4, "srun")
    assert device_index(third, 8) == device_index(third, 4) == 3
    assert device_index(third, 1) == 0
    with pytest.raises(UserError, match=r"4 ranks on this node, but 2 visible GPUs .*start at most 2 ranks"):
        device_index(third, 2)
    # this rank has a GPU, but the last rank of the node would have none
    first = Ranks(4, 0, 8, 4, "torchrun")
    for visible in (3, 1):
        with pytest.raises(UserError, match=f"4 ranks on this node, but {visible} visible GPU"):
            device_index(first, visible)
    # a script of the user may show each process its own
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert device_index(first, 1) == 0


def test_deepspeed_gets_the_device_and_the_launcher_is_remembered(monkeypatch):
    for name in (*TORCHRUN, *DEEPSPEED, *SRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launchers, "_launched", ({}, SINGLE_RANK))
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "stale")
        monkeypatch.delenv(name)
    launched = ranks()
    set_deepspeed_variables(launched, 0)
    assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu-003"
    }  # fmt: skip
    assert os.environ["MASTER_PORT"] == str(launched.port)
    assert ranks() == launched
    monkeypatch.setenv("RANK", "6")
    assert ranks().launcher == "variables set by hand"
