"""The outputs and all gradients of the Triton kernels of moda_depth equal those of the PyTorch reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops.backend import using
from depthlm.ops.moda.bank import depth_of
from depthlm.ops.moda.merge import merged_attention, moda_depth, moda_depth_backward

from ..inputs import DEVICE, in_parallel
from ..inputs import single as normal

triton_ops = pytest.importorskip("depthlm.ops.moda.triton")


def tensors(n: int, kv_heads: int, groups: int, t: int, e: int, b: int = 2) -> list[Tensor]:
    """Return grad_bhte, q_bhte, out_bhte, lse_bht, grad_q_bhte, entries_n2btke and their sums, as in a decoder."""
    h = kv_heads * groups
    grad, q, out, grad_q = (normal(b, t, h, e, seed=j).transpose(1, 2) for j in range(4))
    entries, sums = (normal(n, 2, b, t, kv_heads, e, seed=j) for j in (4, 5))
    return [grad, q, out, normal(b, h, t, seed=99), grad_q, entries, sums]


def results(kernels: str, inputs: list[Tensor], fresh: int = 0) -> list[Tensor]:
    """Return the merged attention and log-sum-exp, the gradient of q, and the sums of the gradients of the entries."""
    grad, q, out, lse, grad_q, entries, sums = inputs
    summed = sums.clone()
    # values that are not replaced make the result NaN
    summed[:fresh] = torch.nan
    with using(kernels):
        attended, merged = moda_depth(q, out, lse, entries)
        total = moda_depth_backward(grad, q, attended, merged, grad_q, entries, summed, fresh)
    return [attended, merged, total, summed]


def assert_same(inputs: list[Tensor], tolerance: float = 1e-5, fresh: int = 0) -> None:
    found, expected = results("triton", inputs, fresh), results("torch", [x.double() for x in inputs], fresh)
    assert found[1].is_contiguous()
    for x, y, dtype in zip(found, expected, [inputs[1].dtype, torch.float32, inputs[1].dtype, None], strict=True):
        assert x.shape == y.shape
        assert dtype in (x.dtype, None)
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@settings(max_examples=4)
@given(
    n=st.integers(1, 7), kv_heads=st.integers(1, 3), groups=st.integers(1, 9), t=st.integers(1, 4),
    e=st.integers(1, 40), fresh=st.integers(0, 7),
)  # fmt: skip
def test_equals_the_reference(n, kv_heads, groups, t, e, fresh):
    assert_same(tensors(n, kv_heads, groups, t, e), fresh=min(fresh, n))


@pytest.mark.parametrize(("n", "groups", "e", "fresh"), [(2, 16, 256, 1), (17, 40, 4, 1), (100, 2, 4, 60)])
def test_largest_shapes(n, groups, e, fresh):
    assert_same(tensors(n, 1, groups, 3, e, b=1), 2e-5, fresh=fresh)


def test_a_range_of_a_bank():
    """Entries and sums are slices, and the sums around them keep their values."""
    *queries, bank, all_sums = tensors(6, 2, 3, 2, 8)
    before = all_sums.clone()
    with using("triton"):
        attended, merged = moda_depth(queries[1], *queries[2:4], bank[2:5])
        moda_depth_backward(queries[0], queries[1], attended, merged, queries[4], bank[2:5], all_sums[2:5], 1)
    expected = results("torch", [*queries, bank[2:5], before[2:5]], fresh=1)
    torch.testing.assert_close(all_sums[2:5], expected[3], rtol=1e-5, atol=1e-5)
    assert torch.equal(all_sums[[0, 1, 5]], before[[0, 1, 5]])


@pytest.mark.parametrize(
    "kind", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="GPU"))]
)
def test_16_bit_inputs(kind):
    inputs = tensors(5, 2, 2, 2, 16)
    assert_same([x if x.ndim == 3 else x.to(kind) for x in inputs], 1e-2, fresh=2)


def test_dtypes_and_memory_layouts_may_differ():
    grad, q, out, lse, grad_q, entries, sums = tensors(3, 2, 2, 2, 8)
    assert_same([grad, q.half(), out.half(), lse, grad_q, entries, sums], 5e-3)
    assert_same([grad.half(), q, out, lse, grad_q, entries.half(), sums.half()], 1e-2)
    wide = torch.cat([entries, entries], -1)[..., 8:]
    # the layout of the log-sum-exp of flash attention on a CPU
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = normal(2, 1, 1, 8).expand(2, 4, 2, 8)
    assert_same([expanded, q.contiguous(), out.contiguous(), turned, grad_q.contiguous(), wide, sums])


def test_large_scores_stay_finite():
    grad, q, out, lse, grad_q, entries, sums = tensors(3, 1, 2, 4, 8)
    entries[:, 0] *= 30
    assert_same([grad, 30 * q, out, 30 * lse, grad_q, entries, sums], 2e-3)


@in_parallel
def test_results_are_bitwise_reproducible():
    inputs = tensors(4, 2, 3, 9, 8)
    assert all(map(torch.equal, *(results("triton", inputs) for _ in range(2))))


@pytest.mark.skipif(DEVICE == "cuda", reason="flash attention on a GPU takes 16 bits only")
def test_attention_over_sequence_and_depth():
    """The autograd function over both parts, with an entry that is used twice."""
    q = tensors(1, 2, 3, 3, 8)[1]
    k, v, *entries = (normal(2, 3, 2, 8, seed=j).transpose(1, 2) for j in range(7))
    found = []
    for kernels in ("triton", "torch"):
        inputs = [x.detach().requires_grad_() for x in (q, k, v, *entries)]
        pairs = [(inputs[3], inputs[4]), (inputs[5], inputs[6]), (inputs[3], inputs[4]), (inputs[1], inputs[7])]
        with using(kernels):
            output = merged_attention(*inputs[:3], depth_of(pairs))
            found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_operators_pass_opcheck():
    grad, q, out, lse, grad_q, entries, sums = tensors(2, 1, 2, 3, 4, b=1)
    torch.library.opcheck(triton_ops.forward, (q, out, lse, entries))
    attended, merged = triton_ops.forward(q, out, lse, entries)
    torch.library.opcheck(triton_ops.backward, (grad, q, attended, merged, grad_q, entries, sums, 1))
