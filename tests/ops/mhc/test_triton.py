"""The outputs and all gradients of the Triton kernels of mhc_post_pre equal those of the PyTorch reference."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops.backend import using
from depthlm.ops.mhc.cpu import PAPER, Form, Parameters, Pending
from depthlm.ops.mhc.naive import mhc_post_pre

from ..compiling import compile_kernels, types_of_streams
from ..inputs import assert_close, low

triton_ops = pytest.importorskip("depthlm.ops.mhc.triton")
triton_streams = pytest.importorskip("depthlm.ops.mhc.triton_streams")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INPUTS = ("x", "phi", "norm", "alpha", "bias", "output", "post in", "res in")
assert_same = partial(assert_close, ("input", "streams", "post", "res", *(f"d {name}" for name in INPUTS)))


def arguments(n: int, d: int, t: int, b: int = 2, seed: int = 0) -> list[Tensor]:
    """Return x, the parameters, and output, post and res of a pending write."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE)

    m = n * (n + 2)
    pending = [normal(b, t, d), 2 * normal(b, t, n).sigmoid(), normal(b, t, n, n).softmax(-1)]
    norm = torch.linspace(0.5, 2, n * d, dtype=torch.float64, device=DEVICE)
    return [normal(b, t, n, d), 0.3 * normal(m, n * d), norm, normal(3), normal(m), *pending]


def outputs_of(inputs: list[Tensor], iterations: int = 20) -> tuple[Tensor, ...]:
    """inputs: those of `arguments`, without the last three if there is no pending write."""
    pending = Pending(*inputs[5:]) if inputs[5:] else None
    return mhc_post_pre(inputs[0], pending, Parameters(*inputs[1:5]), 1e-5, iterations)


def results(kernels: str, inputs: list[Tensor], pending: bool = True, iterations: int = 20) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs from gradients of all outputs."""
    inputs = [x.detach().requires_grad_() for x in (inputs if pending else inputs[:5])]
    with using(kernels):
        outputs = outputs_of(inputs, iterations)
    generator = torch.Generator().manual_seed(9)
    along = [torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, along)]


@settings(max_examples=3)
@given(
    n=st.sampled_from([4, 2, 1, 3, 5, 8]), t=st.integers(1, 9), d=st.integers(1, 40), pending=st.booleans(),
    iterations=st.integers(1, 3),
)  # fmt: skip
def test_outputs_and_gradients_equal_pytorch(n: int, t: int, d: int, pending: bool, iterations: int) -> None:
    single, double = low(arguments(n, d, t), torch.float32)
    found = results("triton", single, pending, iterations)
    assert_same(found, results("naive", double, pending, iterations), 1e-5)


# DeepSeek-V4, and Hunyuan V4, whose H_res is the identity
SHIPPED = {False: Form(pre_eps=1e-2, res_eps=1e-2), True: Form(1.5, pre_eps=1e-2, post_eps=1e-2)}


def results_of_form(kernels: str, inputs: list[Tensor], pending: bool, identity: bool) -> list[Tensor]:
    """Return the outputs and gradients of a norm without a weight, and without the inputs of an H_res of identity."""
    n = inputs[0].shape[2]
    x, phi, _, alpha, bias, *written = inputs
    if identity:
        phi, alpha, bias, written = phi[: 2 * n], alpha[:2], bias[: 2 * n], written[:2]
    leaves = [y.detach().requires_grad_() for y in (x, phi, alpha, bias, *(written if pending else []))]
    x, phi, alpha, bias, *written = leaves
    waiting = Pending(*written, *[None] * identity) if pending else None
    with using(kernels):
        outputs = mhc_post_pre(x, waiting, Parameters(phi, None, alpha, bias), 1e-5, 4, form=SHIPPED[identity])
    assert (outputs[3] is None) == identity
    outputs = [y for y in outputs if y is not None]
    generator = torch.Generator().manual_seed(9)
    along = [torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, along)]


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(("n", "d"), [(4, 40), (3, 7), (1, 5)])
def test_the_forms_that_models_ship_with_equal_the_definition(
    n: int, d: int, pending: bool, identity: bool, kernels: str
) -> None:
    single, double = low(arguments(n, d, 9), torch.float32)
    found, expected = (
        results_of_form(which, inputs, pending, identity) for which, inputs in ((kernels, single), ("naive", double))
    )
    assert_close(map(str, range(12)), found, expected, 1e-5)


@pytest.mark.parametrize(("n", "d"), [(2, 70), (4, 40)])
def test_several_chunks_and_programs(n: int, d: int) -> None:
    """A chunk has 64 columns of two streams or 32 of four, and a program 16 positions."""
    single, double = low(arguments(n, d, 9), torch.float32)
    assert_same(results("triton", single), results("naive", double), 1e-5)


HALF = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("pending", [False, True])
def test_half_precision_is_close_to_fp64(kind: torch.dtype, pending: bool) -> None:
    """The streams are rounded, and then the factors of the product with phi."""
    half, double = low(arguments(4, 24, 5), kind)
    tolerance = 8 * torch.finfo(kind).eps
    assert_same(results("triton", half, pending), results("naive", double, pending), tolerance)


def test_inputs_may_have_different_dtypes() -> None:
    """As under autocast: streams and maps in fp32, the output of a sublayer in 16 bits."""
    inputs = [x.float() for x in arguments(4, 24, 5)]
    inputs[5] = inputs[5].half()
    found, expected = results("triton", inputs), results("naive", [x.double() for x in inputs])
    assert [x.dtype for x in found] == [torch.float32] * 9 + [torch.float16] + [torch.float32] * 2
    assert_same(found[:9], expected[:9], 1e-5)
    assert_same(found, expected, 2e-3)


def test_parameters_and_maps_may_be_in_fp32_beside_streams_of_16_bits() -> None:
    half, double = low(arguments(4, 24, 5), torch.float16)
    inputs = [x if position in (0, 5) else x.float() for position, x in enumerate(half)]
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
    """Streams expanded from the embedding, and transposed tensors and gradients."""
    inputs = [x.float() for x in arguments(4, 24, 5)]
    inputs[0] = inputs[0][:, :, :1].expand(-1, -1, 4, -1)
    inputs[1] = inputs[1].mT.contiguous().mT
    inputs[5] = inputs[5].transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(results("triton", inputs), results("naive", [x.double() for x in inputs]), 1e-5)
    x = inputs[0].clone().requires_grad_()
    with using("triton"):
        read, streams, post, res = outputs_of([x, *inputs[1:5]])
    (read.sum() + streams.sum() + post.sum() + res.transpose(2, 3)[..., 0].sum()).backward()
    assert x.grad.isfinite().all()


def test_unused_outputs_need_no_gradient() -> None:
    inputs = [x.float().requires_grad_() for x in arguments(2, 8, 3)]
    grads = []
    for kernels in ("triton", "naive"):
        with using(kernels):
            outputs = outputs_of(inputs)
        grads.append([torch.autograd.grad(y.sum(), inputs, retain_graph=True, allow_unused=True) for y in outputs])
    for ours, theirs in zip(*grads, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a if b is not None else None, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_logits_stay_finite() -> None:
    inputs = [x.float() for x in arguments(4, 24, 5)]
    inputs[4] = 100 * inputs[4]
    found = results("triton", inputs)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[3].sum(-1), torch.ones_like(found[3][..., 0]))


def test_results_are_bitwise_reproducible() -> None:
    inputs = [x.float() for x in arguments(2, 8, 9)]
    for a, b in zip(*(results("triton", inputs, iterations=3) for _ in range(2)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("n", "d"), [(2, 70), (3, 8)])
def test_a_write_alone_returns_the_same_bits(n: int, d: int) -> None:
    x, phi, norm, alpha, bias, *pending = [y.float() for y in arguments(n, d, 9)]
    settings = 1e-5, 1, list(PAPER), torch.float32
    new = triton_ops.forward([x, *pending], [phi, norm, bias, alpha], *settings)[1]
    assert torch.equal(triton_streams.write_streams([x, *pending]), new)
    identity = [y[: 2 * n] for y in (phi, bias)]
    new = triton_ops.forward([x, *pending[:2]], [*identity, alpha[:2]], *settings)[1]
    assert torch.equal(triton_streams.write_streams([x, *pending[:2]]), new)


@pytest.mark.slow
@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("pending", [False, True])
def test_operators_pass_opcheck(pending: bool, identity: bool) -> None:
    x, phi, norm, alpha, bias, *written = [x.float() for x in arguments(2, 8, 3, b=1)]
    sources = [x, *written] if pending else [x]
    parameters, settings = [phi, norm, bias, alpha], (1e-5, 3, list(PAPER), torch.float32)
    if identity:
        sources, parameters = sources[:3], [phi[:4], bias[:4], alpha[:2]]
    inputs = (sources, parameters, *settings)
    torch.library.opcheck(triton_ops.forward, inputs)
    read, new, *outputs = triton_ops.forward(*inputs)
    maps, kept = outputs[: 1 if identity else 2], outputs[1 if identity else 2 :]
    grads = [torch.ones_like(read), torch.ones_like(new), *maps]
    torch.library.opcheck(triton_ops.backward, (grads, sources, new if pending else x, parameters, kept, *settings))
    if pending:
        torch.library.opcheck(triton_streams.write_streams, (sources,))


def changed(inputs: list[Tensor], which: int, value: Tensor) -> list[Tensor]:
    return [*inputs[:which], value, *inputs[which + 1 :]]


@pytest.mark.parametrize(
    ("which", "change", "error", "words"),
    [
        (1, lambda phi: phi[:-1], ValueError, "phi is [23, 32], must be [24, 32]"),
        (5, lambda y: y[:, :2], ValueError, "output is [2, 2, 8], must be [2, 3, 8]"),
        (7, lambda res: res[..., :3], ValueError, "res is [2, 3, 4, 3], must be [2, 3, 4, 4]"),
        (5, lambda y: y.to("meta"), ValueError, "output is on meta"),
        (3, lambda alpha: alpha.double(), ValueError, "float64 is not fp32, fp16 or bf16"),
    ],
)
def test_invalid_arguments_are_refused(which: int, change: Any, error: type[Exception], words: str) -> None:
    inputs = [x.float() for x in arguments(4, 8, 3)]
    with pytest.raises(error) as refusal:
        results("triton", changed(inputs, which, change(inputs[which])))
    assert words in str(refusal.value)


def test_too_many_streams_are_refused() -> None:
    inputs = [x.float() for x in arguments(9, 8, 3)]
    with pytest.raises(ValueError, match="num_streams=9 is above 8"):
        results("triton", inputs)
    assert len(results("auto", inputs)) == 12


@pytest.mark.slow
def test_the_kernels_compile_for_gpus() -> None:
    kernels, writes, exact = [], [], "*fp32"
    for streams in ("*fp32", "*bf16"):
        for product, dtype in (("*fp32", torch.float32), ("*bf16", torch.bfloat16)):
            for n, pending, identity in ((4, True, False), (4, False, False), (2, True, False), (4, True, True)):
                types = types_of_streams(streams, product, pending, n, triton_ops.COLUMNS, dtype, identity) | {
                    "parameters": [product, exact, exact],
                    "outputs": [streams, streams, *[exact] * (3 if identity else 4)],
                    "kept": [exact, exact],
                    "scratch": [streams, exact, *([] if identity else [exact])],
                    "iterations": "i32",
                }
                kernels += [("mhc_forward", types, {}), ("mhc_backward", types, {})]
                if pending:
                    writes.append(("mhc_write", types, {}))
    compile_kernels("depthlm.ops.mhc.triton", kernels)
    compile_kernels("depthlm.ops.mhc.triton_streams", writes)
