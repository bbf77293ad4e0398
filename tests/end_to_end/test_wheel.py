"""The wheel, installed with the project's dependencies but without its checkout, and used from another folder."""

import json
import os
import shlex
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import depthlm
from depthlm.locations import REPOSITORY
from depthlm.runs.records import COMPLETE, read_run

RUN = [
    "size=micro", "data=local", "data.source=texts", "data.path=tokens", "data.tokenizer=bytes", "tracker=none",
    "precision=fp32", "training.batch_size=2", "training.sequence_length=32", "training.max_steps=4",
    "training.log_every=1", "training.validate_every=null", "training.num_threads=1", "training.sample=null",
]  # fmt: skip

# stand-ins for the cluster's commands, as far as the submission and the job need them
SBATCH = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done > "$FAKE/arguments"
env | grep '^DEPTHLM_' > "$FAKE/environment"
echo '77;cluster'
"""
SQUEUE = "#!/bin/sh\n"
SCONTROL = "#!/bin/sh\necho JobState=RUNNING\n"
SRUN = '#!/bin/sh\nexec "$@"\n'

OWN = """
from depthlm.mechanisms.residual import Residual


class Mine(Residual):
    def write(self, stream, output_btd, carry):
        return super().write(stream, 0.5 * output_btd, carry)
"""


class Reader:
    """A user who has installed the wheel, and works in a folder that contains only texts."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.work = folder / "work"
        (self.work / "texts").mkdir(parents=True)
        for number in range(8):
            (self.work / f"texts/{number}.txt").write_text(f"text {number} of a stream read by every layer\n" * 60)
        python = folder / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
        subprocess.run(pip, check=True)
        self.packages = next((folder / "venv").glob("lib/python*/site-packages"))
        # .pth files in these folders are not read, so the checkout, which is installed by one, cannot be imported
        lines = [f"import sys; sys.path.append({str(Path(path).resolve())!r})" for path in site.getsitepackages()]
        (self.packages / "dependencies.pth").write_text("\n".join(lines) + "\n")
        self.python, self.bin = python, folder / "fake"
        self.bin.mkdir()
        for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL, "srun": SRUN}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def run(self, *command: str | Path, status: int = 0, **environment: str) -> str:
        """Run a command in the folder of texts; return its standard output, or its standard error on failure."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = f"{self.bin}:{kept['PATH']}"
        done = subprocess.run(
            command,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=300,
            env=kept | {"PATH": path, "FAKE": str(self.bin)} | environment,
        )
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout if status == 0 else done.stderr

    def depthlm(self, *arguments: str, status: int = 0, **environment: str) -> str:
        """Run the console script; return its standard output, or its standard error on failure."""
        return self.run(self.python.parent / "depthlm", *arguments, status=status, **environment)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, folder, REPOSITORY], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def reader(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader"), wheel)


@pytest.fixture(scope="module")
def plain(reader: Reader) -> Path:
    """The folder of a run on token files that are prepared before it."""
    assert "train" in reader.depthlm("prepare", *RUN)
    assert (reader.work / "tokens").is_dir()
    reader.depthlm("train", *RUN, "output_dir=one")
    return reader.work / "one"


def test_the_wheel_contains_the_packages_files_that_git_tracks(wheel: Path) -> None:
    folders = ["depthlm", "conf", "hydra_plugins"]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    wanted = {name.replace("conf/", "depthlm/conf/", 1) if name.startswith("conf/") else name
              for name in listed.stdout.splitlines()}  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert wanted <= names
    assert "depthlm/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"depthlm", "hydra_plugins"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_checkout_cannot_be_imported(reader: Reader) -> None:
    script = (
        "import json, sys, depthlm, hydra_plugins; from depthlm.locations import *; "
        "print(json.dumps([depthlm.__file__, str(CONF), IS_CHECKOUT, command('train.py', 'train'), sys.path]))"
    )
    file, conf, is_checkout, command, path = json.loads(reader.run(reader.python, "-c", script))
    assert Path(file).parent == reader.packages / "depthlm"
    assert Path(conf) == reader.packages / "depthlm/conf"
    assert (is_checkout, command) == (False, "depthlm train")
    assert not {str(REPOSITORY), str(REPOSITORY.resolve())} & set(path)


def test_the_version_and_the_help_list_every_command(reader: Reader) -> None:
    assert reader.depthlm("--version") == f"depthlm {depthlm.__version__}\n"
    listed = reader.depthlm("--help")
    for name in (
        "train",
        "prepare",
        "submit",
        "runs",
        "summary",
        "report",
        "evaluate",
        "generate",
        "export",
        "inspect",
    ):
        assert f"\n  {name} " in listed
    assert "optimizer" in reader.depthlm("train", "--help")


def test_a_configuration_composes(reader: Reader) -> None:
    assert '"parameters"' in reader.depthlm("summary", "model=moda", "size=micro", "size.num_layers=1", "--json")
    message = reader.depthlm("summary", "model=mado", status=2)
    assert "no such model; allowed:" in message
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_sweep_is_shown_without_being_submitted(reader: Reader) -> None:
    sweep = "experiment=depth_attention/looped", "budget=smoke", "slurm.gpus_per_node=2"
    printed = reader.depthlm("submit", "--dry-run", *sweep)
    assert "points to train" in printed
    assert str(reader.packages / "depthlm/slurm/sweep.sbatch") in printed
    assert not (reader.work / "outputs").exists()


@pytest.mark.slow
def test_the_wheel_prepares_trains_and_sweeps(reader: Reader, plain: Path) -> None:
    run = read_run(plain)
    assert (run.state, run.step) == (COMPLETE, 4)
    environment = json.loads((plain / "environment.json").read_text())
    assert environment["git"] is None
    assert Path(environment["code"]) == reader.packages
    assert environment["versions"]["depthlm"] == depthlm.__version__
    reader.depthlm("train", "-m", *RUN, "optimizer.lr=0.01,0.02", "output_dir=sweep/${optimizer.lr}")
    losses = [read_run(reader.work / f"sweep/{lr}").loss for lr in ("0.01", "0.02")]
    assert None not in losses
    assert losses[0] != losses[1]
    assert "3 runs below ." in reader.depthlm("runs", "--root", ".")
    report = reader.depthlm("report", "runs=one,sweep/0.01,sweep/0.02", "to=report")
    assert list((reader.work / "report").glob("*.md")), report


@pytest.mark.slow
def test_the_wheel_trains_from_python(reader: Reader) -> None:
    script = (
        "import sys, depthlm; config = depthlm.compose(sys.argv[1:]); code = depthlm.train(config); "
        "model, _ = depthlm.load(config.output_dir); sys.exit(code)"
    )
    reader.run(reader.python, "-c", script, *RUN, "output_dir=from_python")
    assert read_run(reader.work / "from_python").state == COMPLETE


@pytest.mark.slow
def test_a_users_own_mechanism_trains(reader: Reader, plain: Path) -> None:
    (reader.work / "my_depth.py").write_text(OWN)
    folder = reader.work / "my_conf/model/connection"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: my_depth.Mine\n")
    given = ["--config-dir", "my_conf", "model/connection=mine"]
    reader.depthlm("train", *given, *RUN, "output_dir=mine", PYTHONPATH=".")
    losses = [read_run(directory).loss for directory in (reader.work / "mine", plain)]
    assert None not in losses
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_job_trains_with_the_copy_of_the_package_that_was_submitted(reader: Reader) -> None:
    place = "output_dir=cluster/${optimizer.lr}"
    given = [*RUN, "optimizer.lr=0.03,0.04", place, "slurm.gpus_per_node=0", "slurm.extra=[--exclude=n1,n2]"]
    assert "job 77: 2 points" in reader.depthlm("submit", *given)
    sbatch = (reader.bin / "arguments").read_text().splitlines()
    assert {"--array=0-1", "--exclude=n1,n2", "--ntasks-per-node=1", "--requeue"} <= set(sbatch)
    script = sbatch[-1]
    assert Path(script) == reader.packages / "depthlm/slurm/sweep.sbatch"
    snapshot = reader.work / "cluster/.slurm/0001"
    code = snapshot / "code"
    for name in ("depthlm/conf/config.yaml", "depthlm/slurm/train.sbatch", "hydra_plugins/points_sweeper.py"):
        assert (code / name).read_bytes() == (reader.packages / name).read_bytes()
    assert {path.name for path in code.iterdir()} == {"depthlm", "hydra_plugins", "git.json"}
    assert not list(code.rglob("__pycache__"))
    assert (code / "git.json").read_text() == "null\n"
    assert [shlex.split(line)[-1] for line in (snapshot / "points").read_text().splitlines()] == [
        place, place,
    ]  # fmt: skip
    variables = dict(line.split("=", 1) for line in (reader.bin / "environment").read_text().splitlines())
    assert variables["DEPTHLM_PYTHON"] == str(reader.python)
    # later changes do not affect the job
    with (reader.packages / "depthlm/conf/size/micro.yaml").open("a") as file:
        file.write("\nnot_a_key: 1\n")
    job = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "77"}
    try:
        printed = reader.run("bash", script, **variables, **job)
    finally:
        (reader.packages / "depthlm/conf/size/micro.yaml").write_bytes(
            (code / "depthlm/conf/size/micro.yaml").read_bytes()
        )
    assert "optimizer.lr=0.03" in printed
    run = read_run(reader.work / "cluster/0.03")
    assert (run.state, run.step) == (COMPLETE, 4)
    environment = json.loads((run.directory / "environment.json").read_text())
    assert (Path(environment["code"]), environment["git"]) == (code, None)
    assert "1 points to train (1 more" in reader.depthlm("submit", "--dry-run", *given)
