"""The outputs and all gradients of the Triton kernels of depth_value_mix equal those of the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops.backend import using
from depthlm.ops.depth_attention.naive import depth_value_mix

from ..inputs import DEVICE, in_parallel
from ..inputs import single as normal

triton_ops = pytest.importorskip("depthlm.ops.depth_attention.triton")


def tensors(n: int, kv_heads: int, groups: int, t: int, e: int, b: int = 2) -> list[Tensor]:
    """Return q_bhte, n keys and n values, with the memory layout of projections."""
    shapes = [(b, t, kv_heads * groups, e), *[(b, t, kv_heads, e)] * (2 * n)]
    return [normal(*shape, seed=j).transpose(1, 2) for j, shape in enumerate(shapes)]


def results(kernels: str, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the mix, and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    n = len(inputs) // 2
    with using(kernels):
        output = depth_value_mix(inputs[0], inputs[1 : n + 1], inputs[n + 1 :])
    return [output, *torch.autograd.grad(output, inputs, grad.to(output.dtype))]


def assert_same(inputs: list[Tensor], grad: Tensor, tolerance: float = 1e-5) -> None:
    found, expected = results("triton", inputs, grad), results("naive", [x.double() for x in inputs], grad)
    for x, y, like in zip(found, expected, [inputs[-1], *inputs], strict=True):
        assert x.shape == y.shape
        assert x.dtype == like.dtype
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@settings(max_examples=5)
@given(
    n=st.integers(1, 7), kv_heads=st.integers(1, 3), groups=st.integers(1, 8), t=st.integers(1, 9),
    e=st.integers(1, 40),
)  # fmt: skip
def test_equals_the_definition(n, kv_heads, groups, t, e):
    assert_same(tensors(n, kv_heads, groups, t, e), normal(2, kv_heads, t, e, seed=99))


@pytest.mark.parametrize(("n", "groups", "e"), [(64, 1, 4), (3, 2, 256)])
def test_largest_shapes(n, groups, e):
    assert_same(tensors(n, 1, groups, 5, e, b=1), normal(1, 1, 5, e, seed=99))


@pytest.mark.parametrize(
    "kind", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="GPU"))]
)
def test_16_bit_inputs(kind):
    inputs = [x.to(kind) for x in tensors(5, 2, 2, 7, 16)]
    assert_same(inputs, normal(2, 2, 7, 16, seed=99), 4 * torch.finfo(kind).eps)


def test_dtypes_and_memory_layouts_of_inputs_and_gradient_may_differ():
    q, *entries = tensors(3, 2, 2, 5, 8)
    wide = [torch.cat([x, x], -1)[..., 8:] for x in entries]
    assert_same([q.contiguous(), *wide], normal(2, 2, 1, 1, seed=99).expand(2, 2, 5, 8))
    # the last value has the widest dtype, which is that of the mix
    inputs = [q.half(), *(x if j % 2 else x.half() for j, x in enumerate(entries))]
    assert_same(inputs, normal(2, 2, 5, 8, seed=99), 5e-3)


def test_a_source_used_twice_gets_both_gradients():
    q, key, value, _, _ = tensors(2, 2, 2, 5, 8)
    grads = []
    for kernels in ("triton", "naive"):
        q, key, value = (x.detach().requires_grad_() for x in (q, key, value))
        with using(kernels):
            mix = depth_value_mix(q, [key, key, value], [key, value, key])
        grads.append(torch.autograd.grad(mix.square().sum(), (q, key, value)))
    torch.testing.assert_close(*grads)


def test_large_scores_stay_finite():
    q, *entries = tensors(3, 1, 2, 4, 8)
    assert_same([30 * q, *(30 * x for x in entries[:3]), *entries[3:]], normal(2, 1, 4, 8, seed=99), 1e-4)


@in_parallel
def test_results_are_bitwise_reproducible():
    inputs, grad = tensors(4, 2, 3, 9, 8), normal(2, 2, 9, 8, seed=99)
    assert all(map(torch.equal, *(results("triton", inputs, grad) for _ in range(2))))


@pytest.mark.slow
def test_operators_pass_opcheck():
    q, *entries = (x.detach() for x in tensors(2, 1, 2, 3, 4, b=1))
    torch.library.opcheck(triton_ops.forward, (q, entries[:2], entries[2:]))
    mix, lse = triton_ops.forward(q, entries[:2], entries[2:])
    torch.library.opcheck(triton_ops.backward, (torch.ones_like(mix), q, mix, lse, entries[:2], entries[2:]))


@pytest.mark.parametrize(
    ("size", "dtype", "sources", "message"),
    [
        (4, torch.float32, 65, "65 sources, self included, are more than 64"),
        (300, torch.float32, 2, "head size 300 is above 256"),
        (4, torch.float64, 2, "torch.float64 is not fp32, fp16 or bf16"),
    ],
)
def test_unsupported_arguments_are_refused(size, dtype, sources, message):
    x = torch.zeros(1, 1, 1, size, dtype=dtype)
    with using("triton"), pytest.raises(ValueError, match=message):
        depth_value_mix(x, [x] * sources, [x] * sources)
