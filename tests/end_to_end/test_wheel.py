"""The wheel, installed with the project's dependencies but without its checkout, and used from another folder."""

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import depthlm
from depthlm.__main__ import COMMANDS
from depthlm.locations import REPOSITORY
from depthlm.runs.records import COMPLETE, read_run

RUN = [
    "size=micro", "data=local", "data.source=texts", "data.path=tokens", "data.tokenizer=bytes", "tracker=none",
    "precision=fp32", "training.batch_size=2", "training.sequence_length=32", "training.max_steps=4",
    "training.log_every=1", "training.validate_every=null", "training.num_threads=1", "training.sample=null",
]  # fmt: skip


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
        self.python = python

    def run(self, *command: str | Path, status: int = 0) -> str:
        """Run a command in the folder of texts; return its standard output, or its standard error on failure."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(command, cwd=self.work, capture_output=True, text=True, timeout=300, env=kept)
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout if status == 0 else done.stderr

    def depthlm(self, *arguments: str, status: int = 0) -> str:
        """Run the console script; return its standard output, or its standard error on failure."""
        return self.run(self.python.parent / "depthlm", *arguments, status=status)


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


@pytest.mark.slow
def test_the_wheel_contains_the_packages_files_that_git_tracks(wheel):
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


@pytest.mark.slow
def test_the_checkout_cannot_be_imported_and_the_help_lists_every_command(reader):
    script = (
        "import json, sys, depthlm, hydra_plugins; from depthlm.locations import *; "
        "print(json.dumps([depthlm.__file__, str(CONF), IS_CHECKOUT, command('train.py', 'train'), sys.path]))"
    )
    file, conf, is_checkout, command, path = json.loads(reader.run(reader.python, "-c", script))
    assert Path(file).parent == reader.packages / "depthlm"
    assert Path(conf) == reader.packages / "depthlm/conf"
    assert (is_checkout, command) == (False, "depthlm train")
    assert not {str(REPOSITORY), str(REPOSITORY.resolve())} & set(path)
    assert reader.depthlm("--version") == f"depthlm {depthlm.__version__}\n"
    listed = reader.depthlm("--help")
    assert [name for name in COMMANDS if f"\n  {name} " not in listed] == []
    message = reader.depthlm("summary", "model=mado", status=2)
    assert "no such model; allowed:" in message
    assert "Traceback" not in message


@pytest.mark.slow
def test_the_wheel_prepares_trains_and_sweeps(reader):
    assert "train" in reader.depthlm("prepare", *RUN)
    assert (reader.work / "tokens").is_dir()
    reader.depthlm("train", *RUN, "output_dir=one")
    plain = reader.work / "one"
    run = read_run(plain)
    assert (run.state, run.step) == (COMPLETE, 4)
    environment = json.loads((plain / "environment.json").read_text())
    assert environment["git"] is None
    assert Path(environment["code"]) == reader.packages
    assert environment["versions"]["depthlm"] == depthlm.__version__
    script = "import sys, depthlm; sys.exit(depthlm.train(depthlm.compose(sys.argv[1:])))"
    reader.run(reader.python, "-c", script, *RUN, "output_dir=from_python")
    assert read_run(reader.work / "from_python").state == COMPLETE
    reader.depthlm("train", "-m", *RUN, "optimizer.lr=0.01,0.02", "output_dir=sweep/${optimizer.lr}")
    losses = [read_run(reader.work / f"sweep/{lr}").loss for lr in ("0.01", "0.02")]
    assert None not in losses
    assert losses[0] != losses[1]
    assert "4 runs below ." in reader.depthlm("runs", "--root", ".")
    report = reader.depthlm("report", "one", "sweep/0.01", "sweep/0.02", "to=report")
    assert list((reader.work / "report").glob("*.md")), report
