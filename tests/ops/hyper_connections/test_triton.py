"""The outputs and all gradients of the Triton kernels of hyper_post_pre equal those of the PyTorch reference."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops.backend import using
from depthlm.ops.hyper_connections.naive import hyper_post_pre
from depthlm.ops.mhc.cpu import Pending

from ..compiling import compile_kernels, types_of_streams
from ..inputs import assert_close, low

triton_ops = pytest.importorskip("depthlm.ops.hyper_connections.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INPUTS = ("x", "static pre", "static post", "static res", "w", "scale", "output", "post in", "res in")
assert_same = partial(assert_close, ("input", "streams", "post", "res", *(f"d {name}" for name in INPUTS)))


def arguments(n: int, d: int, t: int, b: int = 2) -> list[Tensor]:
    """Return x, the static maps, w and scale, and output, post and res of a pending write."""
    generator = torch.Generator().manual_seed(0)
    shapes = (b, t, n, d), (n,), (n,), (n, n), (n + 2, d), (2,), (b, t, d), (b, t, n), (b, t, n, n)
    inputs = [torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE) for shape in shapes]
    inputs[4] *= 0.3
    return inputs


def outputs_of(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """inputs: those of `arguments`, without the last three if there is no pending write."""
    x, *static, w, scale = inputs[:6]
    return hyper_post_pre(x, Pending(*inputs[6:]) if inputs[6:] else None, tuple(static), (w, scale), 1e-5)


def results(kernels: str, inputs: list[Tensor], pending: bool = True) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs from gradients of all outputs."""
    inputs = [x.detach().requires_grad_() for x in (inputs if pending else inputs[:6])]
    with using(kernels):
        outputs = outputs_of(inputs)
    generator = torch.Generator().manual_seed(9)
    along = [torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, along)]


@settings(max_examples=3)
@given(n=st.sampled_from([4, 2, 1, 3, 5, 8]), t=st.integers(1, 9), d=st.integers(2, 40), pending=st.booleans())
def test_outputs_and_gradients_equal_pytorch(n: int, t: int, d: int, pending: bool) -> None:
    # the norm of a single number has a gradient near zero, a difference of large terms that fp32 cannot hold
    single, double = low(arguments(n, d, t), torch.float32)
    assert_same(results("triton", single, pending), results("naive", double, pending), 1e-5)


@pytest.mark.parametrize(("n", "d"), [(2, 70), (4, 40)])
def test_several_chunks_and_programs(n: int, d: int) -> None:
    """A chunk has 64 columns of two streams or 32 of four, and a program 16 positions."""
    single, double = low(arguments(n, d, 9), torch.float32)
    assert_same(results("triton", single), results("naive", double), 1e-5)


@pytest.mark.parametrize("kind", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pending", [False, True])
def test_half_precision_is_close_to_fp64(kind: torch.dtype, pending: bool) -> None:
    half, double = low(arguments(4, 24, 5), kind)
    tolerance = 8 * torch.finfo(kind).eps
    assert_same(results("triton", half, pending), results("naive", double, pending), tolerance)


def test_inputs_may_have_different_dtypes() -> None:
    """As under autocast: streams and maps in fp32, the output of a sublayer in 16 bits."""
    inputs = [x.float() for x in arguments(4, 24, 5)]
    inputs[6] = inputs[6].half()
    found, expected = results("triton", inputs), results("naive", [x.double() for x in inputs])
    assert [x.dtype for x in found] == [torch.float32] * 10 + [torch.float16] + [torch.float32] * 2
    assert_same(found[:10], expected[:10], 1e-5)
    assert_same(found, expected, 2e-3)


def test_parameters_and_maps_may_be_in_fp32_beside_streams_of_16_bits() -> None:
    half, double = low(arguments(4, 24, 5), torch.float16)
    inputs = [x if position in (0, 6) else x.float() for position, x in enumerate(half)]
    found = results("triton", inputs)
    assert [x.dtype for x in found[4:]] == [x.dtype for x in inputs]
    assert_same(found, results("naive", double), 8 * torch.finfo(torch.float16).eps)
    assert_same(found, [x.double() for x in results("torch", inputs)], 4 * torch.finfo(torch.float16).eps)


def test_autocast_rounds_only_the_product() -> None:
    """With fp16 autocast, the streams remain exact, and the maps are those of a rounded product."""
    inputs = [x.float() for x in arguments(4, 24, 5)]
    with torch.autocast(DEVICE, torch.float16):
        found, expected = results("triton", inputs), results("torch", inputs)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
    assert_same(found, [x.double() for x in expected], 4e-3)
    assert (found[2] - results("torch", inputs)[2]).abs().max() > 1e-5


def test_layout_does_not_matter() -> None:
    """Streams expanded from the embedding, and transposed parameters, outputs and gradients."""
    inputs = [x.float() for x in arguments(4, 24, 5)]
    inputs[0] = inputs[0][:, :, :1].expand(-1, -1, 4, -1)
    inputs[3], inputs[4] = inputs[3].mT, inputs[4].mT.contiguous().mT
    inputs[6] = inputs[6].transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(results("triton", inputs), results("naive", [x.double() for x in inputs]), 1e-5)
    x = inputs[0].clone().requires_grad_()
    with using("triton"):
        read, streams, post, res = outputs_of([x, *inputs[1:6]])
    (read.sum() + streams.sum() + post.sum() + res.transpose(2, 3)[..., 0].sum()).backward()
    assert x.grad.isfinite().all()


def test_unused_outputs_need_no_gradient() -> None:
    inputs = [x.float().requires_grad_() for x in arguments(2, 8, 3)]
    grads = []
    for kernels in ("triton", "naive"):
        with using(kernels):
            outputs = outputs_of(inputs)
        one_each = [torch.autograd.grad(y.sum(), inputs, retain_graph=True, allow_unused=True) for y in outputs]
        grads.append([[0 if grad is None else grad for grad in of_one] for of_one in one_each])
    for ours, theirs in zip(*grads, strict=True):
        for fused, plain in zip(ours, theirs, strict=True):
            torch.testing.assert_close(fused, plain + torch.zeros_like(fused), rtol=1e-4, atol=1e-5)


def test_results_are_bitwise_reproducible() -> None:
    inputs = [x.float() for x in arguments(2, 8, 9)]
    for a, b in zip(*(results("triton", inputs) for _ in range(2)), strict=True):
        assert torch.equal(a, b)


def test_static_maps_run_in_pytorch() -> None:
    x, *static = [y.float() for y in arguments(2, 8, 3)[:4]]
    with using("triton"):
        read, streams, post, res = hyper_post_pre(x, None, tuple(static), None, 1e-5)
    assert streams is x
    torch.testing.assert_close(read, torch.einsum("j,btjd->btd", static[0], x))
    assert torch.equal(post, static[1].expand(2, 3, 2))
    assert torch.equal(res, static[2].expand(2, 3, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("pending", [False, True])
def test_operators_pass_opcheck(pending: bool) -> None:
    x, *static, w, scale, output, post, res = [x.float() for x in arguments(2, 8, 3, b=1)]
    sources = [x, output, post, res] if pending else [x]
    parameters, settings = [w, *static, scale], (1e-5, torch.float32)
    inputs = (sources, parameters, *settings)
    torch.library.opcheck(triton_ops.forward, inputs)
    read, new, post, res, *kept = triton_ops.forward(*inputs)
    grads = [torch.ones_like(read), torch.ones_like(new), post, res]
    torch.library.opcheck(triton_ops.backward, (grads, sources, new if pending else x, parameters, kept, *settings))


@pytest.mark.parametrize(
    ("which", "change", "error", "words"),
    [
        (4, lambda w: w[:-1], ValueError, "w is [5, 8], must be [6, 8]"),
        (3, lambda res: res[:-1], ValueError, "static_res is [3, 4], must be [4, 4]"),
        (6, lambda y: y[:, :2], ValueError, "output is [2, 2, 8], must be [2, 3, 8]"),
        (8, lambda res: res[..., :3], ValueError, "res is [2, 3, 4, 3], must be [2, 3, 4, 4]"),
        (6, lambda y: y.to("meta"), ValueError, "output is on meta"),
        (5, lambda scale: scale.double(), ValueError, "float64 is not fp32, fp16 or bf16"),
    ],
)
def test_invalid_arguments_are_refused(which: int, change: Any, error: type[Exception], words: str) -> None:
    inputs = [x.float() for x in arguments(4, 8, 3)]
    inputs[which] = change(inputs[which])
    with pytest.raises(error) as refusal:
        results("triton", inputs)
    assert words in str(refusal.value)


def test_too_many_streams_are_refused() -> None:
    inputs = [x.float() for x in arguments(9, 8, 3)]
    with pytest.raises(ValueError, match="num_streams=9 is above 8"):
        results("triton", inputs)
    assert len(results("auto", inputs)) == 13


@pytest.mark.slow
def test_the_kernels_compile_for_gpus() -> None:
    kernels, exact = [], "*fp32"
    for streams, size, output, dtype in (
        ("*fp32", 4, "*fp32", torch.float32),
        ("*fp32", 4, "*bf16", torch.bfloat16),
        ("*bf16", 2, "*bf16", torch.bfloat16),
    ):
        for n, pending in ((4, True), (4, False), (2, True)):
            types = types_of_streams(streams, output, pending, n, 128 // size, dtype)
            types |= {"outputs": [streams, streams, *[exact] * 5], "kept": [exact] * 3, "scratch": [exact] * 2}
            kernels.append(("hyper_connections_forward", types | {"parameters": [exact] * 5}, {}))
            kernels.append(("hyper_connections_backward", types | {"parameters": [exact] * 2, "width": "i32"}, {}))
    compile_kernels("depthlm.ops.hyper_connections.triton", kernels)
