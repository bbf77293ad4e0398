"""The memory that a rank may use."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from depthlm.machine import memory as machine_memory
from depthlm.machine.memory import available_memory, cgroup_limits, peak_process_bytes, process_bytes


def machine(root: Path, cgroup: str, **limits: str) -> Path:
    """Return a root with proc and sys. limits: by the path of their file below sys/fs/cgroup, with -- for /."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name.replace("--", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_cgroup_v2_limits_are_those_of_the_group_and_its_parents(tmp_path):
    root = machine(
        tmp_path, "0::/slurm/job/step\n",
        **{"slurm--memory_dot_max": "900", "slurm--job--memory_dot_max": "500", "memory_dot_max": "max",
           "slurm--job--step--memory_dot_max": "max", "elsewhere--memory_dot_max": "1"},
    )  # fmt: skip
    assert sorted(cgroup_limits(root)) == [500, 900]
    assert list(cgroup_limits(tmp_path / "elsewhere")) == []


def test_cgroup_v1_limits_are_those_of_the_memory_controller(tmp_path):
    limits = {f"memory--{path}memory_dot_limit_in_bytes": text for path, text in (("", "800"), ("a--", "300"))}
    root = machine(tmp_path, "5:cpu,cpuacct:/b\n4:memory:/a/gone\n", **limits)
    assert sorted(cgroup_limits(root)) == [300, 800]


def test_ranks_of_a_node_share_the_smaller_of_ram_and_limit(monkeypatch):
    monkeypatch.setattr(machine_memory, "cgroup_limits", lambda: iter([2**30]))
    assert available_memory(torch.device("cpu"), 4) == 2**28
    monkeypatch.setattr(machine_memory, "cgroup_limits", lambda: iter([2**62]))
    physical = available_memory(torch.device("cpu"), 1)
    text = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert physical == pytest.approx(1024 * int(text.split()[1]), rel=0.01)
    # a rank on a GPU has all memory of its GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    assert available_memory(torch.device("cuda", 1), 8) == 80 * 2**30


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not Linux")
def test_the_peak_of_a_process_is_not_that_of_the_process_that_started_it():
    held = bytearray(2**29)
    held[::4096] = b"x" * len(held[::4096])
    program = "from depthlm.machine.memory import peak_process_bytes; print(peak_process_bytes())"
    peak = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert peak < peak_process_bytes() - 2**28
    assert 2**26 < process_bytes() <= peak_process_bytes()
