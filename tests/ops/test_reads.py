"""Kernels of several reads add their gradients of a source to one sum, which equals the sum that autograd makes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthlm.ops.backend import using

from .depth_reads import parameters_of, read
from .inputs import single as normal

pytest.importorskip("triton")
Read = Callable[[int, list[Tensor]], Tensor]


def read_of(kind: str, reads: int, sources: list[Tensor]) -> Tensor:
    return read(kind, parameters_of(kind, reads, len(sources), 8), sources, ())[0]


weighted = partial(read_of, "weighted")


def outputs_of(leaves: list[Tensor], read: Read) -> list[Tensor]:
    """Return what four reads, of one source up to all, make of sources that depend on each other."""
    sources = [leaves[0] * 1]
    for leaf in leaves[1:]:
        sources.append(leaf.to(sources[-1].dtype) + sources[-1].tanh())
    if len(leaves) > 2:
        # a source in 16 bits, which a sum in fp32 of another one does not affect
        sources[1] = sources[1].half()
    counts = ((2, 1), (1, len(sources)), (3, 2), (1, len(sources)))
    return [read(reads, sources[:n]) for reads, n in counts]


def gradients(kernels: str, read: Read, leaves: list[Tensor], times: int = 1) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    with using(kernels):
        outputs = outputs_of(leaves, read)
    loss: Any = sum((x.float() * normal(*x.shape, seed=9)).sum() for x in outputs)
    for _ in range(times):
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
    return list(grads)


def assert_same(found: Read, expected: Read, leaves: int = 2, tolerance: float = 1e-5) -> None:
    """Compare the gradients of reads in Triton with those in PyTorch."""
    given = [normal(1, 3, 8, seed=seed + 1) for seed in range(leaves)]
    for x, y in zip(gradients("triton", found, given), gradients("torch", expected, given), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * y.abs().max().item())


@pytest.mark.parametrize("kind", ["attend", "weighted", pytest.param("gated", marks=pytest.mark.slow)])
def test_gradients_of_sources_that_many_reads_share_equal_those_of_autograd(kind):
    assert_same(partial(read_of, kind), partial(read_of, kind))


def test_a_source_that_is_read_twice_in_one_call_has_the_gradient_of_both():
    def repeated(reads: int, sources: list[Tensor]) -> Tensor:
        return weighted(reads, [*sources, sources[0]])

    assert_same(repeated, repeated)


def test_sources_of_two_dtypes():
    attend = partial(read_of, "attend")
    assert_same(attend, attend, leaves=3, tolerance=1e-2)


def test_a_second_backward_pass_gives_the_same_gradients():
    leaves = [normal(1, 3, 8, seed=seed) for seed in range(2)]
    assert all(map(torch.equal, *(gradients("triton", weighted, leaves, times) for times in (1, 2))))


def test_sums_stay_apart_under_activation_checkpointing():
    def contexts() -> tuple[Any, Any]:
        return using("triton"), using("triton")

    def recomputed(reads: int, sources: list[Tensor]) -> Tensor:
        with using("triton"):
            return checkpoint(weighted, reads, sources, use_reentrant=False, context_fn=contexts)

    assert_same(recomputed, weighted)


def test_autograd_adds_no_gradients_of_shared_sources():
    x = normal(1, 3, 8).requires_grad_() * 1
    with using("triton"):
        outputs = [weighted(1, [x]), weighted(2, [x])]
    # the nodes of the weights, the source and its token
    nodes = [[node for node, _ in y.grad_fn.next_functions if node is not None] for y in outputs]
    assert nodes[0][-1] is nodes[1][-1]
    loss: Any = sum(y.sum() for y in outputs)
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, torch.full_like(grad, normal(1, 1).sum() + normal(2, 1).sum()))
