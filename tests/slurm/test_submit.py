"""slurm/submit.py without a cluster."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from depthlm.locations import REPOSITORY
from depthlm.slurm.snapshot import next_snapshot, take_snapshot
from depthlm.sweeps import sweep_points

from ..forks import Forks, environment_with

Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submit(forks: Forks) -> Submit:
    """Run slurm/submit.py, with these variables of the environment."""
    return lambda *arguments, **more: forks.run(["slurm/submit.py", *arguments], environment=environment_with(**more))


def test_a_dry_run_prints_the_script_and_the_points_of_the_same_sweep(
    four_points: list[str], tmp_path: Path, submit: Submit
) -> None:
    done = submit("--dry-run", *four_points, "slurm.throttle=3", "slurm.nodes=2", "slurm.mem=8G", "slurm.time=12:00:00")
    assert done.returncode == 0, done.stderr
    printed = [shlex.split(line)[3:] for line in done.stdout.splitlines() if "--config-dir" in line]
    points = sweep_points(four_points[2:], four_points[1])
    assert printed == [point.overrides for point in points]
    assert len(points) == 4
    (command,) = [line for line in done.stdout.splitlines() if "sbatch --parsable" in line]
    assert {"--array=0-3%3", "--nodes=2", "--mem=8G", "--time=12:00:00", "--requeue", "--signal=B:USR1@120"} <= set(
        shlex.split(command)
    )
    assert (REPOSITORY / "depthlm/slurm/train.sbatch").read_text() in done.stdout
    assert not (tmp_path / "runs").exists()


def test_invalid_cluster_settings_are_explained(four_points: list[str], submit: Submit) -> None:
    done = submit("--dry-run", *four_points, "slurm.node=2")
    assert done.returncode == 2
    assert "slurm.node" in done.stderr
    assert "nodes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_in_one_point_prevents_submission(
    small_run: Callable[..., list[str]], tmp_path: Path, submit: Submit
) -> None:
    kept = [text for text in small_run() if not text.startswith("output_dir=")]
    done = submit(*kept, "size.num_kv_heads=2,3", f"output_dir={tmp_path}/runs/${{size.num_kv_heads}}")
    assert done.returncode == 2
    assert "size.num_kv_heads=3" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_missing_sbatch_is_reported(small_run: Callable[..., list[str]], tmp_path: Path, submit: Submit) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").symlink_to(shutil.which("git") or "")
    done = submit(*small_run(), PATH=str(tmp_path / "bin"))
    assert done.returncode == 2
    assert "sbatch: no such command" in done.stderr


def test_points_that_start_from_another_form_a_later_array(
    small_run: Callable[..., list[str]], tmp_path: Path, submit: Submit
) -> None:
    folder = tmp_path / "conf/experiment/mine"
    folder.mkdir(parents=True)
    (folder / "retrofit.yaml").write_text(
        """# @package _global_
experiment:
  points:
    - {label: before, model: vanilla}
    - {model: [vanilla, dca], init_from: "@before"}
"""
    )
    kept = [text for text in small_run() if not text.startswith("output_dir=")]
    done = submit("--dry-run", "--config-dir", str(tmp_path / "conf"), "experiment=mine/retrofit", *kept)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if "sbatch --parsable" in line]
    arrays = [next(word for word in command if word.startswith("--array=")) for command in commands]
    assert arrays == ["--array=0-0", "--array=0-1"]
    assert not any("--dependency" in word for word in commands[0])
    assert any(word.startswith("--dependency=afterany:") for word in commands[1])
    assert "DEPTHLM_OFFSET=1" in commands[1]


def test_a_snapshot_copies_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        take_snapshot(next_snapshot(Path("there")), ["a", "b"])
        folder = tmp_path / "there" / f"{number:04d}"
        assert (folder / "points").read_text() == "a\nb\n"
        for name in ("train.py", "conf/config.yaml", "depthlm/config/schema/config.py", "depthlm/slurm/train.sbatch"):
            assert (folder / "code" / name).read_bytes() == (REPOSITORY / name).read_bytes()
        assert not (folder / "code/.venv").exists()
        assert json.loads((folder / "code/git.json").read_text()).keys() == {"commit", "changed"}
