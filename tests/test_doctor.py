"""The output of doctor, for simulated machines and for this one."""

import json
import socket
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from depthlm.config import compose, compose_anywhere
from depthlm.doctor import command, run
from depthlm.doctor.command import OK, PROBLEM, WARNING, Item, doctor, examine, run_check
from depthlm.machine import environment
from depthlm.machine.environment import Gpu

from .forks import Forks

OLD = Gpu(("/dev/nvidia0",), "470.57.02", (11, 4), "2.13.0", "13.0", "The NVIDIA driver on your system is too old")
Usage = namedtuple("Usage", "total used free")


def by_name(overrides: list[str]) -> dict[str, Item]:
    return {item.name: item for item in examine(overrides, None)}


def test_a_run_would_start_here(tmp_path: Path, forks: Forks) -> None:
    done = forks.run(["-m", "depthlm", "doctor", "device=cpu", f"output_dir={tmp_path}/run"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A run would start here" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert "\x1b" not in done.stdout
    assert not done.stderr
    for name in ("Python", "packages", "device", "driver", "NCCL", "C compiler", "Python headers", "memory", "W&B"):
        assert f" {name} " in done.stdout


def test_an_old_driver_is_reported_as_one_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(environment, "probe", lambda: OLD)
    monkeypatch.setattr(run, "probe", lambda: OLD)
    items = by_name([])
    assert [item.name for item in items.values() if item.state == PROBLEM] == ["device"]
    assert "update the driver to one for CUDA 13" in items["device"].remedy
    assert items["driver"].value == (
        "NVIDIA 470.57.02, which supports CUDA up to 11.4; torch 2.13.0 is built for CUDA 13.0"
    )
    assert doctor([], None, as_json=False) == 1
    assert "A run would not start here: problems: 1" in capsys.readouterr().out
    assert doctor(["device=cpu"], None, as_json=True) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["starts"] is True
    assert {"name": "configuration", "value": "device=cpu: no errors", "state": OK, "remedy": ""} in output["items"]


def test_an_invalid_configuration_is_a_problem() -> None:
    item = by_name(["device=cpu", "size=hug"])["configuration"]
    assert item.state == PROBLEM
    assert "size=hug: no such size" in item.value
    item = by_name(["device=cpu", "data=local", "data.source=/nowhere"])["configuration"]
    assert "data.source=/nowhere: no such folder or file" in item.value


def test_the_checks_of_a_run_that_starts_are_made(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    items = by_name([*small_run(), f"data.path={tmp_path}/tokens"])
    assert items["run directory"].value == f"{tmp_path}/run: the run starts from scratch"
    assert items["data of run"].value == "local: the run prepares local when it starts"
    assert " GiB estimated, " in items["memory of run"].value
    assert {items[name].state for name in ("run directory", "data of run", "memory of run")} == {OK}


def test_what_a_run_refuses_when_it_starts_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "available_memory", lambda device, local_ranks: 2**20)
    (tmp_path / "config.yaml").write_text("somebody: else\n")
    overrides = ["device=cpu", "size=micro", "data=c4", f"data.path={tmp_path}/tokens", f"output_dir={tmp_path}"]
    items = by_name(overrides)
    assert [item.name for item in items.values() if item.state == PROBLEM] == [
        "run directory", "memory of run", "data of run",
    ]  # fmt: skip
    assert "this is no run directory" in items["run directory"].value
    assert items["memory of run"].value.startswith("the run does not fit in memory: ")
    assert "memory=ignore starts the run anyway" in items["memory of run"].remedy
    assert items["data of run"].value == "not prepared: c4: data=c4"
    assert f"data/prepare.py data=c4 data.path={tmp_path}/tokens" in items["data of run"].remedy
    assert doctor(overrides, None, as_json=False) == 1
    assert "A run would not start here: problems: 3" in capsys.readouterr().out


def test_a_run_that_may_not_fit_in_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["device=cpu", "size=micro", "memory=ignore"])
    needed = run.run_memory(config).value.partition(" GiB")[0]
    monkeypatch.setattr(run, "available_memory", lambda device, local_ranks: round(1.1 * float(needed) * 2**30))
    assert run.run_memory(config).state == WARNING


def test_a_failing_import_of_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ImportError(f"lib{name}.so: cannot open shared object file\nmore")

    monkeypatch.setattr("importlib.import_module", import_module)
    *_, last = examine([], None)
    assert (last.state, last.value) == (
        PROBLEM,
        "import torch: ImportError: libtorch.so: cannot open shared object file",
    )


def test_packages_in_a_disallowed_version_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.0.0", "rich": None, "lm-eval": None}
    known = command.installed_version
    monkeypatch.setattr(
        command, "installed_version", lambda name: versions.get(name, known(name)) if name in versions else known(name)
    )
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda _: ["torch>=2.9", "rich>=13", "numpy", "x; extra == 'dev'"]
    )
    packages, extras = command.packages()
    assert packages.state == PROBLEM
    assert packages.value.startswith(
        "torch is 2.0.0, but torch>=2.9 is required; rich is not installed; torch 2.0.0, numpy"
    )
    assert "pip install" in packages.remedy
    assert (extras.state, "not evaluation: pip install -e '.[evaluation]'" in extras.value) == (OK, True)


def test_missing_compilers_matter_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert [item.state for item in command.c_compiler("cpu")] == [OK, OK]
    compiler, headers = command.c_compiler("cuda")
    assert (compiler.state, headers.state) == (WARNING, OK)
    assert "install gcc" in compiler.remedy
    states = [command.cpp_compiler(*case).state for case in (("cpu", False), ("cpu", True), ("cuda", True))]
    assert states == [WARNING, PROBLEM, OK]


def test_little_free_space_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 2**40, 64 * 2**20))
    assert run.disk("disk", tmp_path / "a/b").state == WARNING
    assert run.shared_memory().state == WARNING
    (tmp_path / "file").touch()
    assert run.disk("disk", tmp_path / "file/run").state == PROBLEM
    monkeypatch.setattr(run, "memory_limits", lambda: (64 * 2**30, 60 * 2**30, 2**30))
    limited = run.memory()
    assert (limited.state, "this process may use 1.0 GiB" in limited.value) == (WARNING, True)


def test_wandb_with_a_key_and_no_network_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("WANDB_API_KEY", "x")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        assert by_name(["device=cpu"])["W&B"].value.startswith("online")
    assert by_name(["device=cpu"])["W&B"].state == WARNING
    assert by_name(["device=cpu", "tracker=none"])["W&B"].value.startswith("not used")


def test_contradicting_launcher_variables_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_anywhere()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("depthlm.distributed.launchers._launched", ({}, None))
    (item,) = run.ranks(config)
    assert (item.state, "WORLD_SIZE is not set" in item.remedy) == (PROBLEM, True)


def test_a_failing_check_becomes_a_problem() -> None:
    def broken() -> Item:
        raise ZeroDivisionError("by zero")

    (item,) = run_check("memory", broken)
    assert (item.state, item.value) == (PROBLEM, "this check failed: ZeroDivisionError: by zero")


def test_working_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    Properties = namedtuple("Properties", "name total_memory major minor")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Properties("NVIDIA H100", 80 * 2**30, 9, 0))
    value = run.device("auto").value
    assert value == (
        "cuda:0: NVIDIA H100, 80.0 GiB, compute capability 9.0; cuda:1: NVIDIA H100, 80.0 GiB, compute capability 9.0"
    )
    monkeypatch.setattr(run, "probe", lambda: replace(OLD, driver="580.1", driver_cuda=(13, 0), failure=None))
    assert run.driver().state == OK
