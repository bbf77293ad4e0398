"""The outputs and all gradients of the Triton kernels of moda_depth equal those of the PyTorch reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.kernels.backend import using
from depthlm.kernels.moda.merge import merged_attention
from depthlm.kernels.moda.reference import moda_depth, moda_depth_backward

from ..compiling import compile_kernels

triton_ops = pytest.importorskip("depthlm.kernels.moda.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensors(n: int, kv_heads: int, groups: int, t: int, e: int, b: int = 2) -> list[Tensor]:
    """Return grad_bhte, q_bhte, out_bhte, lse_bht, n keys and n values, with the layouts that a decoder has."""
    h = kv_heads * groups
    shapes = [*[(b, t, h, e)] * 3, *[(b, t, kv_heads, e)] * (2 * n)]
    grad, q, out, *entries = (normal(*shape, seed=j).transpose(1, 2) for j, shape in enumerate(shapes))
    return [grad, q, out, normal(b, h, t, seed=99), *entries]


def results(kernels: str, inputs: list[Tensor]) -> list[Tensor]:
    """Return the merged context and log-sum-exp, and the gradients of q, keys and values from the depth part."""
    grad, q, out, lse, *entries = inputs
    keys, values = entries[: len(entries) // 2], entries[len(entries) // 2 :]
    with using(kernels):
        context, merged = moda_depth(q, out, lse, keys, values)
        grad_q, grad_keys, grad_values = moda_depth_backward(grad, q, context, merged, keys, values)
    return [context, merged, grad_q, *grad_keys, *grad_values]


def assert_same(inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    found, expected = results("triton", inputs), results("torch", [x.double() for x in inputs])
    assert found[1].is_contiguous()
    exact = torch.empty(0)
    for x, y, like in zip(found, expected, [inputs[1], exact, exact, *inputs[4:]], strict=True):
        assert x.shape == y.shape
        assert x.dtype == like.dtype
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@settings(max_examples=6, deadline=None)
@given(
    n=st.integers(1, 7), kv_heads=st.integers(1, 3), groups=st.integers(1, 9), t=st.integers(1, 9),
    e=st.integers(1, 40),
)  # fmt: skip
def test_equals_the_reference(n: int, kv_heads: int, groups: int, t: int, e: int) -> None:
    assert_same(tensors(n, kv_heads, groups, t, e))


@pytest.mark.parametrize(("n", "groups", "e"), [(1, 1, 8), (2, 8, 256), (2, 16, 256), (1, 40, 4)])
def test_smallest_and_largest_shapes(n: int, groups: int, e: int) -> None:
    assert_same(tensors(n, 1, groups, 3, e, b=1), 2e-5)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_many_entries_need_several_launches(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(triton_ops, "PER_LAUNCH", 2)
    assert_same(tensors(n, 2, 3, 5, 8))
    low = [x.half() if x.ndim == 4 else x for x in tensors(n, 2, 3, 5, 8)]
    assert_same(low, 4e-3)


def test_a_hundred_entries() -> None:
    assert_same(tensors(100, 1, 2, 3, 4, b=1))


@pytest.mark.parametrize(
    "kind", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="GPU"))]
)
def test_16_bit_inputs(kind: torch.dtype) -> None:
    grad, q, out, lse, *entries = tensors(5, 2, 2, 7, 16)
    assert_same([grad.to(kind), q.to(kind), out.to(kind), lse, *(x.to(kind) for x in entries)], 8e-3)


def test_inputs_may_have_different_dtypes() -> None:
    grad, q, out, lse, *entries = tensors(3, 2, 2, 5, 8)
    assert_same([grad, q.half(), out.half(), lse, *(x if j % 2 else x.half() for j, x in enumerate(entries))], 5e-3)


def test_memory_layouts_do_not_matter() -> None:
    _, q, out, lse, *entries = tensors(3, 2, 2, 5, 8)
    wide = [torch.cat([x, x], -1)[..., 8:] for x in entries]
    # the layout of the log-sum-exp of flash attention on a CPU
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same([normal(2, 1, 1, 8).expand(2, 4, 5, 8), q.contiguous(), out.contiguous(), turned, *wide])


def test_large_scores_stay_finite() -> None:
    grad, q, out, lse, *entries = tensors(3, 1, 2, 4, 8)
    assert_same([grad, 30 * q, out, 30 * lse, *(30 * x for x in entries[:3]), *entries[3:]], 2e-3)


def test_results_are_bitwise_reproducible() -> None:
    inputs = tensors(4, 2, 3, 9, 8)
    for x, y in zip(*(results("triton", inputs) for _ in range(2)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.skipif(DEVICE == "cuda", reason="flash attention on a GPU takes 16 bits only")
def test_attention_over_sequence_and_depth() -> None:
    """The autograd function over both parts, with an entry that is used twice."""
    _, q, _, _, k, v, *entries = tensors(4, 2, 3, 6, 8)
    found = []
    for kernels in ("triton", "torch"):
        inputs = [x.detach().requires_grad_() for x in (q, k, v, *entries)]
        depth = [(inputs[3], inputs[4]), (inputs[5], inputs[6]), (inputs[3], inputs[4]), (inputs[1], inputs[7])]
        with using(kernels):
            output = merged_attention(*inputs[:3], depth)
            found.append([output, *torch.autograd.grad(output.square().sum(), inputs[:8])])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_operators_pass_opcheck() -> None:
    grad, q, out, lse, *entries = tensors(2, 1, 2, 3, 4, b=1)
    torch.library.opcheck(triton_ops.forward, (q, out, lse, entries[:2], entries[2:]))
    context, merged = triton_ops.forward(q, out, lse, entries[:2], entries[2:])
    torch.library.opcheck(triton_ops.backward, (grad, q, context, merged, entries[:2], entries[2:]))


def test_unsupported_arguments_are_refused() -> None:
    _, q, out, lse, key, value = tensors(1, 2, 2, 3, 4)
    wide, wide_lse = normal(1, 1, 1, 300), normal(1, 1, 1)
    refused: list[tuple[Any, type[Exception], str]] = [
        ((wide, wide, wide_lse, [wide], [wide]), ValueError, "head size 300 is above 256"),
        ((q, out, lse, [key], [value.double()]), ValueError, "torch.float64 is not fp32, fp16 or bf16"),
        ((q, out, lse.double(), [key], [value]), TypeError, "lse is torch.float64"),
        ((q, out, lse[..., 1:], [key], [value]), ValueError, r"lse is \[2, 4, 2\], must be \[2, 4, 3\]"),
        ((q, out, lse, [key], [value[:, :, 1:]]), ValueError, r"values\[0\] is \[2, 2, 2, 4\], must be"),
        ((q, out.to("meta"), lse, [key], [value]), ValueError, "out is on meta, must be on"),
    ]
    for arguments, error, message in refused:
        with using("triton"), pytest.raises(error, match=message):
            moda_depth(*arguments)


@pytest.mark.slow
def test_the_kernels_compile_for_gpus() -> None:
    types: dict[str, Any] = {f"{name}_ptr": "*bf16" for name in ("q", "out", "context", "grad")}
    types |= {f"{name}_ptr": "*fp32" for name in ("lse", "merged", "grad_q")}
    types |= {f"{name}_ptrs": ["*bf16"] * 4 for name in ("key", "value", "grad_key", "grad_value")}
    types |= dict.fromkeys(("rows", "tokens", "n"), "i32")
    tiles = {"_forward": triton_ops.FORWARD_TILE, "_backward": triton_ops.BACKWARD_TILE}
    for e, ep, groups, gp in ((64, 64, 2, 2), (128, 128, 3, 4), (256, 256, 8, 8)):
        values = {"SCALE": e**-0.5, "K": 4, "G": groups, "GP": gp, "E": e, "EP": ep}
        blocks = {name: max(1, tile // (gp * ep)) for name, tile in tiles.items()}
        kernels = [(name, types, values | {"BR": block}) for name, block in blocks.items()]
        compile_kernels("depthlm.kernels.moda.triton", kernels)
