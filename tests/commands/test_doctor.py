"""The output of doctor, for simulated machines and for this one."""

import json
from collections import namedtuple

from depthlm.commands import doctor as command
from depthlm.commands.doctor import OK, PROBLEM, Item, doctor, examine
from depthlm.machine import environment
from depthlm.machine.environment import Gpu

OLD = Gpu(("/dev/nvidia0",), "470.57.02", (11, 4), "2.13.0", "13.0", "The NVIDIA driver on your system is too old")
Usage = namedtuple("Usage", "total used free")


def by_name(overrides: list[str]) -> dict[str, Item]:
    return {item.name: item for item in examine(overrides, None)}


def test_a_run_would_start_here(small_run, tmp_path, forks):
    done = forks.run(["-m", "depthlm", "doctor", "--json", *small_run()])
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads(done.stdout)
    assert output["starts"] is True
    names = [item["name"] for item in output["items"]]
    assert {"Python", "packages", "extras", "device", "disk", "W&B", "run"} <= {*names}
    value = f"the dry run had no errors; a run writes to {tmp_path}/run"
    assert output["items"][-1] == {"name": "run", "value": value, "state": OK, "remedy": ""}
    assert not (tmp_path / "run").exists()


def test_an_old_driver_is_reported_as_one_problem(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(environment, "probe", lambda: OLD)
    monkeypatch.setattr(command, "probe", lambda: OLD)
    items = by_name([])
    assert [item.name for item in items.values() if item.state == PROBLEM] == ["run"]
    assert "update the driver to one for CUDA 13" in items["run"].value
    assert items["device"].value.endswith(
        "NVIDIA driver 470.57.02, which supports CUDA up to 11.4; torch 2.13.0 is built for CUDA 13.0"
    )
    assert doctor([], None, as_json=False) == 1
    assert "A run would not start here: 1 problem" in capsys.readouterr().out


def test_what_a_run_refuses_is_a_problem(tmp_path, monkeypatch, capsys):
    assert "size=hug: no such size" in by_name(["device=cpu", "size=hug"])["run"].value
    overrides = ["device=cpu", "size=micro", "data=c4", f"data.path={tmp_path}/tokens", f"output_dir={tmp_path}/run"]
    item = by_name(overrides)["run"]
    assert item.state == PROBLEM
    assert f"data/prepare.py data=c4 data.path={tmp_path}/tokens" in item.value
    monkeypatch.setattr("depthlm.training.setup.available_memory", lambda device, local_ranks: 2**20)
    assert by_name(overrides)["run"].value.startswith("the run does not fit in memory: ")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("somebody: else\n")
    assert "this is no run directory" in by_name(overrides)["run"].value
    assert doctor(overrides, None, as_json=False) == 1
    assert "A run would not start here: 1 problem" in capsys.readouterr().out


def test_packages_in_a_disallowed_version_are_a_problem(monkeypatch):
    versions = {"torch": "2.0.0", "rich": None, "lm-eval": None}
    known = command.installed_version
    monkeypatch.setattr(
        command, "installed_version", lambda name: versions.get(name, known(name)) if name in versions else known(name)
    )
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda _: ["torch>=2.9", "rich>=13", "numpy", "x; extra == 'dev'"]
    )
    packages = command.packages()
    assert packages.state == PROBLEM
    assert packages.value.startswith(
        "torch is 2.0.0, but torch>=2.9 is required; rich is not installed; torch 2.0.0, numpy"
    )
    assert "pip install" in packages.remedy
    assert "not evaluation: pip install -e '.[evaluation]'" in command.extras().value
