"""slurm/submit.py without a cluster."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from depthlm.config import compose
from depthlm.config.keys import replace_values
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.slurm.cluster import queued_points, record_array
from depthlm.slurm.submit import job_config_text, main
from depthlm.sweeps import Point, sweep_points
from depthlm.sweeps.best import is_done

from ..report.made_up import write_run

Submit = Callable[..., str]


@pytest.fixture
def submit(capsys: pytest.CaptureFixture[str]) -> Submit:
    """Submit to nodes without GPUs, as `slurm/submit.py` does, and return what is printed."""

    def printed(*arguments: str) -> str:
        main(["slurm.gpus_per_node=0", *arguments], "submit")
        return capsys.readouterr().out

    return printed


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands of SLURM that are written by the test."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin"


def without_directory(overrides: list[str]) -> list[str]:
    return [text for text in overrides if not text.startswith("output_dir=")]


def test_a_dry_run_prints_the_script_and_the_points_of_the_same_sweep(four_points, tmp_path, submit):
    output = submit(
        "--dry-run", *four_points, "slurm.throttle=3", "slurm.nodes=2", "slurm.mem=8G", "slurm.time=12:00:00"
    )
    printed = [shlex.split(line)[4:] for line in output.splitlines() if "--config-dir" in line]
    points = sweep_points(four_points[2:], four_points[1])
    assert printed == [point.overrides for point in points]
    assert len(points) == 4
    (command,) = [line for line in output.splitlines() if "sbatch --parsable" in line]
    assert {"--array=0-3%3", "--nodes=2", "--mem=8G", "--time=12:00:00", "--requeue", "--signal=B:USR1@120"} <= set(
        shlex.split(command)
    )
    assert (REPOSITORY / "depthlm/slurm/train.sbatch").read_text() in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_points_that_start_from_another_form_a_later_array(small_run, tmp_path, submit):
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
    given = ["--config-dir", str(tmp_path / "conf"), "experiment=mine/retrofit", *without_directory(small_run())]
    output = submit("--dry-run", *given)
    commands = [shlex.split(line) for line in output.splitlines() if "sbatch --parsable" in line]
    arrays = [next(word for word in command if word.startswith("--array=")) for command in commands]
    assert arrays == ["--array=0-0", "--array=0-1"]
    assert not any("--dependency" in word for word in commands[0])
    assert any(word.startswith("--dependency=afterany:") for word in commands[1])
    assert "DEPTHLM_OFFSET=1" in commands[1]


def fake(folder: Path, name: str, script: str) -> None:
    """Put a command of SLURM into a folder, written in bash."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/usr/bin/env bash\n" + script)
    (folder / name).chmod(0o755)


@pytest.mark.slow
def test_two_submissions_at_once_train_every_point_once(four_points, tmp_path, bin_folder, forks):
    queue = tmp_path / "queue"
    # an id of its own for each array, whose tasks wait in the queue, after a line of the cluster's own
    fake(bin_folder, "sbatch", f'echo Welcome; echo $$; for i in 0 1 2 3; do echo "$$ $i PENDING" >> {queue}; done\n')
    fake(bin_folder, "squeue", f'echo "squeue: 2 nodes are down"; echo "7 N/A PENDING"; cat {queue} 2>/dev/null\n')
    command = ["slurm/submit.py", "slurm.gpus_per_node=0", *four_points]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: forks.run(command), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert sorted(text.stdout.splitlines()[0] for text in (first, second)) == [
        "0 points to train (4 more are complete, or have a job)",
        "4 points to train",
    ]
    assert [folder.name for folder in (tmp_path / "runs/.slurm").glob("0*")] == ["0001"]


@pytest.mark.slow
def test_every_folder_of_a_sweep_knows_its_jobs(four_points, tmp_path, bin_folder, submit):
    given = [*without_directory(four_points), f"output_dir={tmp_path}/runs/${{model.name}}/${{optimizer.lr}}"]
    fake(bin_folder, "sbatch", "echo 12\n")
    fake(bin_folder, "squeue", "for i in 0 1 2 3; do echo 12 $i PENDING; done\n")
    assert "4 points to train" in submit(*given)
    models = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(models) == 2
    for name in models:
        assert "0 points to train (2 more are complete, or have a job)" in submit(*given, f"model={name}")
    # the code is in one of them
    assert len([*(tmp_path / "runs").glob("*/.slurm/0001/code")]) == 1


def test_a_complete_run_without_its_last_checkpoint_is_submitted_again_on_request(tmp_path):
    write_run(tmp_path / "run", 3.0)
    for resume in ("auto", "retrain"):
        (point,) = sweep_points(["size=micro", f"output_dir={tmp_path}/run", f"resume={resume}"])
        (tmp_path / "run/config.yaml").write_text(job_config_text(point))
        assert is_done(point) == (resume == "auto")


def test_a_submission_that_sbatch_rejects_or_gives_no_id_is_reported_and_leaves_no_snapshot(
    four_points, tmp_path, bin_folder, submit
):
    # one of the points
    point = [*four_points, "model=vanilla", "optimizer.lr=0.001"]
    fake(bin_folder, "sbatch", 'echo "Requested node configuration is not available" >&2; exit 1\n')
    with pytest.raises(UserError, match="sbatch: Requested node configuration is not available"):
        submit(*point)
    assert [*(tmp_path / "runs/.slurm").glob("0*")] == []
    # what was there before stays there
    (tmp_path / "runs/.slurm/0001").mkdir(parents=True)
    fake(bin_folder, "sbatch", 'echo "Welcome to the cluster"\n')
    with pytest.raises(UserError, match=r"(?s)printed no id.*squeue --me"):
        submit(*point)
    assert (tmp_path / "runs/.slurm/0001").exists()


def test_what_training_would_refuse_is_not_submitted(four_points, tmp_path, submit):
    with pytest.raises(UserError) as refused:
        submit(*four_points, "slurm.nodes=3")
    (reason,) = [line for line in str(refused.value).splitlines() if "is not divisible" in line]
    for words in (f"{tmp_path}/runs/vanilla-0.001, {tmp_path}/runs/vanilla-0.002",
                  "and 1 more: training.batch_size=", "is not divisible by the 3 ranks",
                  "slurm.gpus_per_node=0 gives one, on a CPU"):  # fmt: skip
        assert words in reason
    for more, words in (
        (["slurm.gpus_per_node=1", "slurm.gpu_memory=0.001"],
         r"(?s)the run does not fit in memory:.*0.00 GiB is what each GPU has"),
        (["slurm.mem=1M"], "0.00 GiB is 80% of the memory for each rank"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            submit(*four_points, "model=vanilla", "optimizer.lr=0.001", *more)
    assert [*(tmp_path / "runs/.slurm").glob("0*")] == []


def test_a_complete_run_counts_unless_its_settings_or_the_code_of_its_mechanism_have_changed(
    small_run, tmp_path, monkeypatch, submit
):
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "own_submitted.py"
    own.write_text("from depthlm.mechanisms.residual import Residual\n\n\nclass Mine(Residual):\n    pass\n")
    overrides = small_run("model.connection._target_=own_submitted.Mine", "data=stdlib")
    write_run(tmp_path / "run", config=asdict(compose(overrides)), peak_memory_gib=1.0, unigram_entropy=2.0)
    assert submit("--dry-run", *overrides).startswith("0 points to train (1 more are complete")
    # what only affects the speed
    assert submit("--dry-run", *overrides, "kernels=torch", "deepspeed=zero1").startswith("0 points to train")
    with pytest.raises(UserError, match=r"run: .*another configuration:\n.*optimizer.lr: the run has"):
        submit("--dry-run", *overrides, "optimizer.lr=0.5")
    own.write_text(own.read_text() + "\n    scale = 2.0\n")
    refusal = r"run: .*another configuration:\n.*code.own_submitted.Mine: .*\n.*Restore the code of these classes"
    with pytest.raises(UserError, match=refusal):
        submit("--dry-run", *overrides)


def test_a_dry_run_prints_the_plan_of_a_batch_that_the_ranks_cannot_share(small_run, submit, capsys):
    with pytest.raises(UserError, match="nothing is submitted, because training would refuse:"):
        submit("--dry-run", *small_run("training.batch_size=4", "data=stdlib"), "slurm.gpus_per_node=8")
    printed = capsys.readouterr().out
    assert "memory is not estimated, since 8 ranks cannot train" in printed
    assert "sbatch --parsable" in printed


def test_a_requeued_job_resumes_its_run_and_a_throttle_holds_for_all_arrays(four_points, submit, monkeypatch):
    (point, *_) = sweep_points([*four_points[2:], "resume=never"], four_points[1])
    assert "resume: auto" in job_config_text(point)
    monkeypatch.setattr("depthlm.slurm.submit.max_array_size", lambda: 2)
    for given, chained in (["slurm.throttle=1"], True), ([], False):
        commands = [line for line in submit("--dry-run", *four_points, *given).splitlines() if "sbatch --p" in line]
        assert ["--dependency=afterany:" in command for command in commands] == [False, chained]


def test_a_point_is_not_submitted_before_the_run_that_it_starts_from(small_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "conf/experiment/mine").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine/chain.yaml").write_text(
        """# @package _global_
experiment:
  points:
    - {label: a, model: vanilla}
    - {label: b, model: dca, init_from: "@a"}
    - {label: c, model: mhc, init_from: "@b"}
"""
    )
    given = ["--config-dir", str(tmp_path / "conf"), "experiment=mine/chain", "data=stdlib", "slurm.gpus_per_node=0"]
    monkeypatch.chdir(tmp_path)
    first = sweep_points(given[2:4], given[1])[0].directory
    monkeypatch.setattr("depthlm.slurm.submit.queued_points", lambda folders: {first: ("waiting", "")})
    main([*given, "--dry-run"], "submit")
    assert "2 points start from runs that have a job, or from others that do" in capsys.readouterr().out
    monkeypatch.setattr("depthlm.slurm.submit.queued_points", lambda folders: {})
    with pytest.raises(UserError, match=f"starts from {first}, which is not complete; train it first"):
        main([*given, "--dry-run", "model=dca"], "submit")


def test_a_run_whose_precision_its_machine_chose_is_continued(small_run, tmp_path, submit):
    overrides = small_run("precision=auto", "data=stdlib")
    for precision in ("fp32", "bf16"):
        config = replace_values(Point(overrides).config, {"precision.name": precision})
        (write_run(tmp_path / "run", done=0.5, config=asdict(config)) / ".saved").touch()
        assert submit("--dry-run", *overrides).startswith("1 points to train\n")


def test_a_choice_is_submitted_in_the_rounds_that_its_runs_call_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = ["optimizer.lr=1e-3,2e-3", "seed=1", "experiment.best_over=optimizer.lr", "experiment.widen=0"]
    sweep.append("experiment.selection_seeds=[11]")

    def submitted(queued: set[str]) -> str:
        monkeypatch.setattr(
            "depthlm.slurm.submit.queued_points", lambda folders: dict.fromkeys(queued, ("waiting", ""))
        )
        main([*sweep, "slurm.gpus_per_node=0", "--dry-run"], "submit")
        return capsys.readouterr().out

    points = sweep_points(sweep)
    choosing = [point.directory for point in points]
    waiting = "1 group without a chosen value yet: vanilla (0 of 2 runs done); repeat this command when these runs"
    assert waiting in submitted({*choosing})
    monkeypatch.setattr("depthlm.slurm.submit.queued_points", lambda folders: {})
    main([*sweep, "--status"], "submit")
    assert "vanilla (0 of 2 runs done)" in capsys.readouterr().out
    # a run that diverged has decided, and is not submitted again
    configs = [asdict(point.config_elsewhere()) for point in points]
    write_run(choosing[0], 3.0, config=configs[0])
    write_run(choosing[1], config=configs[1], failure="DivergedError: 11 bad batches in a row")
    printed = submitted(set())
    assert "1 points to train (2 more are complete, or have a job)" in printed
    assert "optimizer.lr=0.001 seed=1" in printed
    assert "without a chosen value" not in printed


def test_points_wait_for_the_preparation_of_their_data_and_a_dry_run_prints_the_plan_before(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("depthlm.slurm.start.COMMON_GPU", 7e7)
    refused = r"(?s)seed2-c4-path-tokens: not prepared: c4: data=c4. Prepare it, .*data/prepare.py data=c4 data.path="
    with pytest.raises(UserError, match=refused):
        main(["size=micro", "data=c4", "data.path=tokens", "seed=1,2", "--dry-run"], "submit")
    printed = capsys.readouterr().out
    assert "train.py size=micro data=c4 data.path=tokens seed=2" in printed
    assert re.search(
        r"-path-tokens needs 0\.\d\d GiB of each GPU; in 0 GB fit: deepspeed=zero1 \(0\.\d\d GiB\)", printed
    )


def test_the_status_says_why_a_job_waits_and_where_a_job_that_ended_has_its_log(
    four_points, tmp_path, bin_folder, submit
):
    snapshot = tmp_path / "runs/.slurm/0001"
    snapshot.mkdir(parents=True)
    points = sweep_points(four_points[2:], four_points[1])
    record_array(snapshot, "12", [point.directory for point in points], snapshot)
    lines = ("12 0 PENDING PartitionConfig", "12 1 PENDING Priority", "12 2 RUNNING None", "12 3 TIMEOUT None")
    fake(bin_folder, "squeue", "".join(f"echo '{line}'\n" for line in lines))
    printed = submit("--status", *four_points)
    lines = [re.split(r"  +", line.strip()) for line in printed.splitlines()]
    assert [line[-1] for line in lines[3:7]] == [
        "waits: PartitionConfig",
        "waits: Priority",
        "running",
        f"the job ended before its run began; see {snapshot}/log-12_3.txt",
    ]
    # a job that waits extends the run that is complete
    write_run(points[0].directory, 3.0)
    assert queued_points([snapshot.parent])[points[0].directory] == ("waiting", "waits: PartitionConfig")


# as SLURM for the last task of array 40, whose own id is that of the array: its id alone names all tasks
SCONTROL = """
echo "$*" >> "$0.calls"
if [ "$1" = requeue ]; then kill -TERM "$PPID"; exit 0; fi
[ "$4" = 40_3 ] && echo "JobId=40 ArrayTaskId=3 JobState=RUNNING" || printf 'JobId=%s JobState=COMPLETED\\n' 41 42 40
"""
TASK = {"SLURM_JOB_ID": "40", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_COUNT": "4"}  # fmt: skip


def test_the_last_task_of_an_array_requeues_itself(tmp_path):
    fake(tmp_path, "scontrol", SCONTROL)
    # the run saves and exits with 75 on the signal
    fake(tmp_path, "srun", "trap 'exit 75' USR1; touch begun; sleep 30 & wait\n")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **TASK}
    job = subprocess.Popen(["bash", REPOSITORY / "depthlm/slurm/train.sbatch"], cwd=tmp_path, env=variables)
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    job.wait(20)
    assert (tmp_path / "scontrol.calls").read_text().splitlines()[-1] == "requeue 40_3"
