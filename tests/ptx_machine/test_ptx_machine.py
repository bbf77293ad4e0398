"""Compiled kernels run on the CPU: the machine finds known faults, and none in a few launches of reads."""

import os
import subprocess
import sys

import pytest

from depthlm.locations import REPOSITORY

pytest.importorskip("triton")


def run(module: str, *arguments: str) -> str:
    """Run a module in a process of its own, since it takes the place of Triton's launches. Returns its output."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options", [pytest.param(["--quick"], marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.release)]
)
def test_the_machine_finds_known_faults_and_none_without_them(options: list[str]) -> None:
    assert run("tests.ptx_machine.prove", *options).splitlines()[-1] == "all proved"


@pytest.mark.slow
def test_compiled_reads_of_a_source_that_occurs_twice_have_no_fault() -> None:
    lines = run("tests.ptx_machine", "--only", "repeated weighted reads1").splitlines()
    assert [line for line in lines if line.endswith("agrees")] == lines[:1]
