"""Kernels of several reads add their gradients of a source to one sum, which equals the sum that autograd makes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.backend import using
from depthlm.ops.dca.naive import gated_reads
from depthlm.ops.denseformer.naive import weighted_reads

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def attend(reads: int, sources: list[Tensor]) -> Tensor:
    return depth_attend(normal(reads, 8, seed=5), sources, 1e-5)[0]


def weighted(reads: int, sources: list[Tensor]) -> Tensor:
    return weighted_reads(normal(reads, len(sources), seed=6), sources)


def gated(reads: int, sources: list[Tensor]) -> Tensor:
    return gated_reads(*(normal(reads, len(sources), 8, seed=seed) for seed in (7, 8)), sources)


def outputs_of(leaves: list[Tensor], read: Any) -> list[Tensor]:
    """Return what four reads, of one source up to all, make of sources that depend on each other."""
    sources = [leaves[0] * 1]
    for leaf in leaves[1:]:
        sources.append(leaf.to(sources[-1].dtype) + sources[-1].tanh())
    if len(leaves) > 2:
        # a source in 16 bits, which a sum in fp32 of another one does not affect
        sources[1] = sources[1].half()
    counts = ((2, 1), (1, len(sources)), (3, 2), (1, len(sources)))
    return [read(reads, sources[:n]) for reads, n in counts]


def gradients(kernels: str, read: Any, leaves: list[Tensor], times: int = 1) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    with using(kernels):
        outputs = outputs_of(leaves, read)
    loss = sum((x.float() * normal(*x.shape, seed=9)).sum() for x in outputs)
    assert isinstance(loss, Tensor)
    for _ in range(times):
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
    return list(grads)


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * y.abs().max().item())


@pytest.mark.parametrize("read", [attend, weighted, gated])
def test_gradients_of_sources_that_many_reads_share_equal_those_of_autograd(read: Any) -> None:
    leaves = [normal(1, 3, 8, seed=seed) for seed in range(2)]
    assert_same(gradients("triton", read, leaves), gradients("torch", read, leaves))


@pytest.mark.parametrize("read", [attend, weighted, gated])
def test_a_source_that_is_read_twice_in_one_call_has_the_gradient_of_both(read: Any) -> None:
    def repeated(reads: int, sources: list[Tensor]) -> Tensor:
        return read(reads, [*sources, sources[0]])

    leaves = [normal(1, 3, 8, seed=seed) for seed in range(2)]
    assert_same(gradients("triton", repeated, leaves), gradients("torch", repeated, leaves))


@pytest.mark.parametrize("read", [attend, pytest.param(weighted, marks=pytest.mark.slow)])
def test_sources_of_two_dtypes(read: Any) -> None:
    leaves = [normal(1, 3, 8, seed=seed) for seed in range(3)]
    assert_same(gradients("triton", read, leaves), gradients("torch", read, leaves), 1e-2)


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    leaves = [normal(1, 3, 8, seed=seed) for seed in range(2)]
    once, twice = (gradients("triton", weighted, leaves, times) for times in (1, 2))
    assert all(torch.equal(x, y) for x, y in zip(once, twice, strict=True))


def test_sums_stay_apart_under_activation_checkpointing() -> None:
    leaves = [normal(1, 3, 8, seed=seed) for seed in range(2)]

    def recomputed(reads: int, sources: list[Tensor]) -> Tensor:
        with using("triton"):
            return checkpoint(weighted, reads, sources, use_reentrant=False, context_fn=contexts)

    def contexts() -> tuple[Any, Any]:
        return using("triton"), using("triton")

    assert_same(gradients("triton", recomputed, leaves), gradients("torch", weighted, leaves))


def test_autograd_adds_no_gradients_of_shared_sources() -> None:
    x = normal(1, 3, 8).requires_grad_() * 1
    with using("triton"):
        outputs = [weighted(1, [x]), weighted(2, [x])]
    # the nodes of the weights, the source and its token
    nodes = [[node for node, _ in y.grad_fn.next_functions if node is not None] for y in outputs]
    assert nodes[0][-1] is nodes[1][-1]
    loss: Any = sum(y.sum() for y in outputs)
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, torch.full_like(grad, normal(1, 1, seed=6).sum() + normal(2, 1, seed=6).sum()))
