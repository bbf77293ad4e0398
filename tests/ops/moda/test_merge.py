"""The merge of a flash attention and a depth part equals one softmax over sequence and depth."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlm.ops.moda import merge
from depthlm.ops.moda.bank import depth_of
from depthlm.ops.moda.merge import attend_with_flash
from depthlm.ops.moda.naive import attend_with_scores


def tensors(heads: int, kv_heads: int, t: int, s: int, entries: int, e: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * 100 + t)
    shapes = [(heads, t), (kv_heads, s), (kv_heads, s), *[(kv_heads, t)] * (2 * entries)]
    return [torch.randn(2, h, n, e, dtype=torch.float64, generator=generator).requires_grad_() for h, n in shapes]


def call(attend: Any, inputs: list[torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
    """The entries are in a bank for flash attention, and separate tensors for the definition."""
    q, k, v, *depth = inputs
    pairs = list(zip(depth[::2], depth[1::2], strict=True))
    return attend(q, k, v, depth_of(pairs) if attend is attend_with_flash else pairs, mask)


def any_mask(t: int, s: int, seed: int) -> torch.Tensor:
    """Return a random mask_b1ts of two rows, in which each of the last t of s tokens attends to itself."""
    mask = torch.rand(2, 1, t, s, generator=torch.Generator().manual_seed(seed)) < 0.4
    return mask | torch.eye(s, dtype=torch.bool)[s - t :]


@settings(max_examples=20)
@given(
    kv_heads=st.integers(1, 3), groups=st.integers(1, 4), t=st.integers(1, 9), entries=st.integers(1, 6),
    held=st.none() | st.integers(0, 5), chunk=st.sampled_from([50, merge.CHUNK]),
)  # fmt: skip
def test_merge_equals_one_softmax(kv_heads, groups, t, entries, held, chunk):
    """held: the number of cached tokens, with a mask; None: no mask. chunk: of the depth part."""
    inputs = tensors(kv_heads * groups, kv_heads, t, t + (held or 0), entries)
    mask = None if held is None else any_mask(t, t + held, seed=t)
    along = torch.randn(inputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "CHUNK", chunk)
        outputs = [call(attend, inputs, mask) for attend in (attend_with_flash, attend_with_scores)]
        grads = [torch.autograd.grad(output, inputs, along) for output in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
    for merged, plain in zip(*grads, strict=True):
        torch.testing.assert_close(merged, plain, rtol=1e-9, atol=1e-9)


def test_mask_may_hide_complete_blocks_of_flash_attention():
    """The blocks of flash attention have up to 512 keys. The last tokens attend to no key of the first block."""
    inputs, document = tensors(2, 1, 600, 600, 1), torch.arange(600) // 550
    mask = ((document[:, None] == document) & torch.ones(600, 600, dtype=torch.bool).tril()).expand(2, 1, -1, -1)
    outputs = [call(attend, inputs, mask) for attend in (attend_with_flash, attend_with_scores)]
    torch.testing.assert_close(*outputs)
    grads = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("masked", "dtype", "attend"),
    [
        (False, torch.float32, attend_with_flash),
        (True, torch.bfloat16, attend_with_flash),
        (False, torch.bfloat16, attend_with_scores),
    ],
)
def test_lower_precision_is_close(masked, dtype, attend):
    inputs, mask = tensors(6, 2, 33, 33, 5, e=16), any_mask(33, 33, seed=0) if masked else None
    expected = call(attend_with_scores, inputs, mask)
    low = [x.detach().to(dtype).requires_grad_() for x in inputs]
    output = call(attend, low, mask)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    output.backward(torch.ones_like(output))
    grads = torch.autograd.grad(expected, inputs, torch.ones_like(expected))
    for x, grad in zip(low, grads, strict=True):
        assert x.grad.dtype == dtype
        assert torch.nn.functional.cosine_similarity(x.grad.double().flatten(), grad.flatten(), dim=0) > 0.999


def test_entries_with_any_memory_layout_and_used_twice():
    q, k, v, key, value = tensors(4, 2, 5, 5, 1)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)]
    wide = torch.cat([value, key], -1)[..., 4:]
    outputs = [call(attend, [q, k, v, *turned, wide, value]) for attend in (attend_with_flash, attend_with_scores)]
    torch.testing.assert_close(*outputs)
    grads = [torch.autograd.grad(y.sum(), [q, k, v, key, value]) for y in outputs]
    torch.testing.assert_close(*grads)


def test_autocast_does_not_round_the_depth_part():
    inputs = [x.detach().float().requires_grad_() for x in tensors(4, 2, 7, 7, 3)]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = call(attend_with_flash, inputs)
            found.append([output, *torch.autograd.grad(output.sum(), inputs)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
