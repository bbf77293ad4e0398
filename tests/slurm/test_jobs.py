"""What a job of a sweep gets: the snapshot of the code, and its configuration."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.config import compose
from depthlm.config.compose import compose_unchecked
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.runs.records import STOPPED, read_run
from depthlm.slurm.submit import job_config_text, next_snapshot, take_snapshot
from depthlm.sweeps import Point
from depthlm.training import train


def test_a_snapshot_copies_the_checkout_and_is_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = [Point(["model=mhc"]), Point(["model=dca", "seed=2"])]
    for number in (1, 2):
        take_snapshot(next_snapshot(Path("there")), points)
        folder = tmp_path / "there" / f"{number:04d}"
        for name in ("train.py", "conf/config.yaml", "depthlm/config/schema.py", "depthlm/slurm/train.sbatch"):
            assert (folder / "code" / name).read_bytes() == (REPOSITORY / name).read_bytes()
        assert not (folder / "code/.venv").exists()
        assert json.loads((folder / "code/git.json").read_text()).keys() == {"commit", "changed"}
        for index, point in enumerate(points):
            assert compose([f"config={folder}/points/{index}.yaml"]) == compose(point.overrides)
    with pytest.raises(UserError, match="0002: the code cannot be copied there"):
        take_snapshot(folder, points)


@settings(max_examples=20)
@given(st.text(min_size=1))
def test_a_job_reads_the_configuration_that_was_submitted_whatever_characters_it_has(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("sweep") / "0.yaml"
    point = Point(["data=local", "data.tokenizer=bytes"])
    config = replace(point.config, data=replace(point.config.data, source=text))
    # the attribute of a property that is cached
    point.__dict__["config"] = config
    file.write_text(job_config_text(point), encoding="utf-8")
    assert compose_unchecked([f"config={file}"]) == config


def test_a_run_that_a_command_has_begun_is_resumed_by_its_job_and_the_other_way_round(small_run, tmp_path):
    overrides = small_run("training.max_steps=6")
    job = tmp_path / "0.yaml"
    job.write_text(job_config_text(Point([*overrides, "training.stop_after=4"])))
    for chosen in ([*overrides, "training.stop_after=2"], [f"config={job}"]):
        assert train(compose(chosen)) == 0
        assert read_run(tmp_path / "run").state == STOPPED
    assert train(compose(overrides)) == 0
    assert [row["step"] for row in read_run(tmp_path / "run").rows] == [*range(1, 7)]


def run_job(sweep: Path, index: int) -> subprocess.CompletedProcess[bytes]:
    """Run the job of a point, as SLURM would, in a sweep whose code only prints its arguments."""
    script = sweep / "code/depthlm/slurm/train.sbatch"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("""printf '%s\\0' "$@"\n""")
    variables = {"DEPTHLM_SWEEP": str(sweep), "SLURM_ARRAY_TASK_ID": str(index), "DEPTHLM_OFFSET": "2"}
    command = ["bash", REPOSITORY / "depthlm/slurm/sweep.sbatch"]
    return subprocess.run(command, env={"PATH": os.environ["PATH"], **variables}, capture_output=True)


def test_a_job_trains_the_configuration_of_its_index_and_exits_with_2_without_one(tmp_path):
    sweep = tmp_path / "a sweep's $folder"
    (sweep / "points").mkdir(parents=True)
    (sweep / "points/3.yaml").touch()
    assert run_job(sweep, 1).stdout.decode() == f"{sweep}/points/3.yaml\nconfig={sweep}/points/3.yaml\0"
    done = run_job(sweep, 2)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"4.yaml: no point for index 2" in done.stderr
