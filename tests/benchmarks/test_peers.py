"""The comparison with other libraries runs, and finds differences."""

import json
import subprocess
import sys

import yaml

from benchmarks import peers
from depthlm.locations import CONF, REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results/peers-sm90.json"


def test_the_widths_are_those_of_the_sizes():
    for size, width in peers.SIZES.items():
        assert width == yaml.safe_load((CONF / f"size/{size}.yaml").read_text())["hidden_size"]


def test_without_a_peer_the_command_says_what_to_install():
    # a module that exists nowhere else
    program = "import sys; sys.path.insert(0, '.'); from benchmarks import peers; peers.main()"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install --no-deps liger-kernel fla-core einops" in done.stderr


def test_we_move_fewer_bytes():
    lines = {(x["operator"], x["size"], x["by"]): x for x in json.loads(RESULTS.read_text())["lines"]}
    for (operator, size, by), line in lines.items():
        ours = lines[operator, size, "ours"]
        assert all(kernel["stack"] == 0 for kernel in ours["kernels"])
        if by != "ours":
            assert ours["moved_gb"] < line["moved_gb"] / 2, (operator, size, by)
            assert ours["launches"] < line["launches"], (operator, size, by)
