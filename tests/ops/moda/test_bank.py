"""The gradients of entries in a bank equal those of separate tensors, for every kind of backward pass."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthlm.ops.moda.bank import Bank, Depth, depth_of
from depthlm.ops.moda.merge import attend_with_flash
from depthlm.ops.moda.naive import attend_with_scores

LAYERS, B, H, K, T, E = 4, 2, 4, 2, 5, 4


def weights() -> list[Tensor]:
    """Return x, and of each layer a weight of the queries and four of its two entries."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, T, E), *[(E,)] * (5 * LAYERS)]
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def layer(x: Tensor, own: list[Tensor], depth: Any, banked: bool, slots: int | None) -> tuple[Tensor, Any]:
    """A layer as in a decoder: an attention entry, whose key and value its attention uses too, and a second entry."""
    q, k, v, key, value = (x * weight for weight in own)
    k, v, key, value = (y.unflatten(1, (K, -1)).mean(2) for y in (k, v, key, value))
    if banked:
        kept = depth.append(k, v, slots)
        k, v = kept[-1]
    else:
        kept = [*depth, (k, v)][-(slots or 100) :]
    if depth:
        x = x + (attend_with_flash if banked else attend_with_scores)(q, k, v, depth)
    else:
        x = x + q * (k + v).repeat_interleave(H // K, 1)
    return x, kept.append(key, value, slots) if banked else [*kept, (key, value)][-(slots or 100) :]


def loss(tensors: list[Tensor], banked: bool, slots: int | None = None, recompute: bool = False) -> Tensor:
    x, *rest = tensors
    depth: Any = Depth(Bank(2 * LAYERS)) if banked else []
    for i in range(LAYERS):
        arguments = x, rest[5 * i : 5 * i + 5], depth, banked, slots
        x, depth = checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)
    return x.square().sum()


def test_gradients_of_a_limited_list_equal_those_of_separate_entries_after_a_recomputation():
    tensors = weights()
    losses = loss(tensors, True, slots=3, recompute=True), loss(tensors, False, slots=3)
    torch.testing.assert_close(*losses)
    found, expected = (torch.autograd.grad(one, tensors, allow_unused=True) for one in losses)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            torch.testing.assert_close(x, y)


def test_backward_passes_through_the_same_graph_start_again():
    tensors = weights()
    total = loss(tensors, True)
    expected = torch.autograd.grad(total, tensors, retain_graph=True, allow_unused=True)
    # a pass that does not reach the first entries, and so does not end the sums
    torch.autograd.grad(total, tensors[-5:-3], retain_graph=True)
    found = torch.autograd.grad(total, tensors, allow_unused=True)
    assert all(x is y or torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("frozen", [slice(0, 11), slice(12, 13)])
def test_some_tensors_are_frozen(frozen):
    tensors = weights()
    for x in tensors[frozen]:
        x.requires_grad_(False)
    trained = [x for x in tensors if x.requires_grad]
    passes = (torch.autograd.grad(loss(tensors, banked), trained, allow_unused=True) for banked in (True, False))
    for x, y in zip(*passes, strict=True):
        assert x is y is None or torch.allclose(x, y)


def test_readers_may_run_in_any_order():
    """In the backward pass, the first and the last of three entries have sums before all are read."""
    generator = torch.Generator().manual_seed(1)
    make = lambda h: torch.randn(B, h, T, E, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    q, *entries = make(H), *(make(K) for _ in range(6))
    pairs = list(zip(entries[::2], entries[1::2], strict=True))
    depth = depth_of(pairs)
    one = Depth(depth.bank, depth.pairs[:1], 1, depth.token)
    end = Depth(depth.bank, depth.pairs[2:], 3, depth.token)
    x = attend_with_flash(q, *pairs[0], depth)
    found = attend_with_flash(x, *pairs[1], one) + attend_with_flash(x, *pairs[1], end)
    y = attend_with_scores(q, *pairs[0], pairs)
    expected = attend_with_scores(y, *pairs[1], pairs[:1]) + attend_with_scores(y, *pairs[1], pairs[2:])
    grads = [torch.autograd.grad(z.square().sum(), [q, *entries]) for z in (found, expected)]
    torch.testing.assert_close(*grads)


def test_a_backward_pass_frees_the_bank_and_the_sums():
    tensors = weights()
    bank = Bank(2 * LAYERS)
    x, depth = layer(tensors[0], tensors[1:6], Depth(bank), True, None)
    x, depth = layer(x, tensors[6:11], depth, True, None)
    storage = weakref.ref(bank.entries_n2btke.untyped_storage())
    total, sums = x.sum(), bank.sums
    del x, depth, bank
    assert storage() is not None
    total.backward()
    assert storage() is None
    assert sums.sums_n2btke is None
