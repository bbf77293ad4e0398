"""Streams that are computed again in the backward pass give the same gradients, bit for bit, and take less memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from depthlm.ops.backend import using
from depthlm.ops.hyper_connections.naive import hyper_post_pre
from depthlm.ops.mhc.cpu import Parameters, Pending
from depthlm.ops.mhc.naive import mhc_post_pre, write_streams
from depthlm.ops.mhc.rebuilding import RUN

from ..inputs import DEVICE

N, D, WRITES = 2, 8, 2 * RUN + 3


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """Make all tensors on a GPU where there is one."""
    with torch.device(DEVICE):
        yield


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed))


def hyper_connections_chain(x: Tensor, weights: list[Tensor], rebuild: bool) -> Tensor:
    w, output = weights
    static, pending = (torch.ones(N) / N, torch.ones(N), torch.eye(N)), None
    for _ in range(WRITES + 1):
        read, x, post, res = hyper_post_pre(x, pending, static, (w, torch.full((2,), 0.1)), 1e-5, rebuild)
        pending = Pending(output * read, post, res)
    return write_streams(x, pending)


def mhc_chain(x: Tensor, weights: list[Tensor], rebuild: bool) -> Tensor:
    phi, output = weights
    parameters, pending = Parameters(phi, torch.ones(N * D), torch.ones(3), torch.zeros(N * (N + 2))), None
    for _ in range(WRITES + 1):
        read, x, post, res = mhc_post_pre(x, pending, parameters, 1e-5, 3, rebuild)
        pending = Pending(output * read, post, res)
    return write_streams(x, pending)


def late_mhc_chain(x: Tensor, weights: list[Tensor], rebuild: bool) -> Tensor:
    phi, output = weights
    parameters, pending = Parameters(phi, torch.ones(N * D), torch.ones(3), torch.zeros(N * (N + 2))), None
    pre = torch.ones(x.shape[:3]) / N
    for _ in range(WRITES + 1):
        read, x, post, res, pre = mhc_post_pre(x, pending, parameters, 1e-5, 3, rebuild, pre_btn=pre)
        pending = Pending(output * read, post, res)
    return write_streams(x, pending)


M = N * (N + 2)
SHAPES = {hyper_connections_chain: (N + 2, D), mhc_chain: (M, N * D), late_mhc_chain: (M, N * D)}


@pytest.mark.parametrize(
    ("chain", "kernels"),
    [
        *((chain, "torch") for chain in SHAPES),
        *(pytest.param(chain, "triton", marks=pytest.mark.slow) for chain in (mhc_chain, late_mhc_chain)),
    ],
)
def test_gradients_are_the_same_and_few_streams_are_saved(chain: Any, kernels: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
    start = normal(1, 3, N, D, seed=0)
    results, kept = [], []
    for rebuild in (False, True):
        weights = [normal(*SHAPES[chain], seed=1).mul_(0.3).requires_grad_(), normal(D, seed=2).requires_grad_()]
        x, saved = (2 * start.clone().requires_grad_()), {}

        def pack(y: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            if y.numel() == start.numel():
                saved[y.untyped_storage().data_ptr()] = y
            return y

        with using(kernels), torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            loss = chain(x, weights, rebuild).square().sum()
        kept.append(len(saved))
        # the second backward pass computes the streams again
        first = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
        second = torch.autograd.grad(loss, [x, *weights])
        assert all(map(torch.equal, first, second))
        results.append([loss, *first])
    for plain, rebuilt in zip(*results, strict=True):
        assert torch.equal(plain, rebuilt)
    # the first streams and every RUN-th; without rebuilding each
    assert kept[0] >= WRITES
    assert kept[1] <= 2 + WRITES // RUN + 1
