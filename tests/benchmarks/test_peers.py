"""The comparison with other libraries runs, and finds differences."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import peers
from depthlm.locations import CONF, REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results/peers-sm90.json"
# plain PyTorch in place of Liger-Kernel and the operator of MoDA's authors, which the tests do not install
ATTN_RES = """
import torch.nn.functional as F

class LigerAttnResFunction:
    @staticmethod
    def apply(v, query, norm, eps):
        return ((F.rms_norm(v, v.shape[-1:], norm, eps) @ query).softmax(0)[..., None] * v).sum(0)
"""
MHC = """
import torch

class LigerMHCPostResFunction:
    @staticmethod
    def apply(x, y, post, res):
        return res @ x + post[..., None] * y[..., None, :]

class LigerMHCCoeffsFunction:
    @staticmethod
    def apply(x, phi, bias, pre, post, res, allow_fp32, iterations, eps, pre_eps, sinkhorn_eps, post_scale):
        flat, n = x.flatten(-2), x.shape[-2]
        m = flat @ phi / (flat.square().mean(-1, keepdim=True) + eps).sqrt()
        m_pre, m_post, m_res = m.split((n, n, n * n), -1)
        b_pre, b_post, b_res = bias.split((n, n, n * n))
        h = (res * m_res + b_res).unflatten(-1, (n, n)).exp()
        for _ in range(iterations):
            h = h / h.sum(-1, keepdim=True)
            h = h / h.sum(-2, keepdim=True)
        return (pre * m_pre + b_pre).sigmoid(), post_scale * (post * m_post + b_post).sigmoid(), h

class LigerMHCPreFunction:
    @staticmethod
    def apply(x, pre):
        return (pre[..., None, :] @ x)[..., 0, :]
"""


# in their layout: the queries of a group are positions of one head, the entries of a position follow one another
MODA = """
import torch

def naive_mixture_of_depth_causal_ref(q, k, v, depth_k, depth_v, moda_group_num):
    t, scale = k.shape[1], k.shape[-1] ** -0.5
    place_q = torch.arange(q.shape[1]) // moda_group_num
    sequence = torch.einsum("bqhe,bshe->bhqs", q, k).masked_fill(torch.arange(t) > place_q[:, None], -torch.inf)
    depth_k, depth_v = (x.unflatten(1, (t, -1))[:, place_q] for x in (depth_k, depth_v))
    depth = torch.einsum("bqhe,bqnhe->bhqn", q, depth_k)
    p = (scale * torch.cat((sequence, depth), -1)).softmax(-1)
    of_depth = torch.einsum("bhqn,bqnhe->bqhe", p[..., t:], depth_v)
    return torch.einsum("bhqs,bshe->bqhe", p[..., :t], v) + of_depth, None
"""


def compare(folder: Path, *arguments: str, attn_res: str = ATTN_RES) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run the comparison with the stand-ins for the peers; return the process and its results."""
    operators, output = folder / "liger_kernel/ops", folder / "peers.json"
    operators.mkdir(parents=True)
    (operators / "attn_res.py").write_text(attn_res)
    (operators / "mhc.py").write_text(MHC)
    (folder / "fla/ops/moda").mkdir(parents=True)
    (folder / "fla/ops/moda/__init__.py").write_text(MODA)
    for package in ("liger-kernel", "flash-linear-attention"):
        metadata = folder / f"{package.replace('-', '_')}-0.0.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: {package}\nVersion: 0.0\n")
    command = [sys.executable, "benchmarks/peers.py", *arguments, "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    return done, json.loads(output.read_text())


@pytest.mark.slow
def test_our_operators_equal_plain_definitions(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done, results = compare(tmp_path, "--check")
    assert done.returncode == 0, done.stderr
    assert [(x["operator"], x["by"], x["passed"]) for x in results["lines"]] == [
        ("mhc", "liger", True),
        ("moda", "moda", True),
        ("attention_residuals", "liger", True),
    ]
    assert results["peers"] == {"liger": "0.0", "moda": "0.0"}


@pytest.mark.slow
def test_a_difference_fails_the_comparison_and_times_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done, results = compare(tmp_path / "check", "--check", attn_res=ATTN_RES.replace("softmax(0)", "sigmoid()"))
    assert done.returncode == 1
    assert [x["passed"] for x in results["lines"]] == [True, True, False]
    done, results = compare(tmp_path / "time", "--time", "--tiny")
    assert done.returncode == 0, done.stderr
    contenders = [("ours", True), ("liger", True), ("ours", True), ("moda", True), ("ours", True), ("liger", True)]
    assert [(x["by"], x["ours_is_faster_by"] > 0) for x in results["lines"]] == contenders


def test_the_widths_are_those_of_the_sizes() -> None:
    for size, width in peers.SIZES.items():
        assert width == yaml.safe_load((CONF / f"size/{size}.yaml").read_text())["hidden_size"]


def test_without_a_peer_the_command_says_what_to_install() -> None:
    # a module that exists nowhere else
    program = "import sys; sys.path.insert(0, '.'); from benchmarks import peers; peers.main()"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install --no-deps liger-kernel fla-core einops" in done.stderr


def test_we_move_fewer_bytes() -> None:
    lines = {(x["operator"], x["size"], x["by"]): x for x in json.loads(RESULTS.read_text())["lines"]}
    for (operator, size, by), line in lines.items():
        ours = lines[operator, size, "ours"]
        assert all(kernel["stack"] == 0 for kernel in ours["kernels"])
        if by != "ours":
            assert ours["moved_gb"] < line["moved_gb"] / 2, (operator, size, by)
            assert ours["launches"] < line["launches"], (operator, size, by)
