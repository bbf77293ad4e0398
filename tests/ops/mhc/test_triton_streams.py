"""The outputs and all gradients of the Triton kernels of mhc and hyper_connections equal those of the definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops.backend import using
from depthlm.ops.hyper_connections.naive import hyper_post_pre
from depthlm.ops.mhc.cpu import PAPER, Form, Parameters, Pending
from depthlm.ops.mhc.naive import mhc_post_pre

from ..inputs import DEVICE, assert_close, in_parallel, low

mhc_triton = pytest.importorskip("depthlm.ops.mhc.triton")
hyper_triton = pytest.importorskip("depthlm.ops.hyper_connections.triton")
triton_streams = pytest.importorskip("depthlm.ops.mhc.triton_streams")
# the names of the parameters
NAMES = {
    "mhc": ("phi", "norm", "alpha", "bias"),
    "hyper_connections": ("static pre", "static post", "static res", "w", "scale"),
}
of_both = pytest.mark.parametrize("kind", NAMES)


def arguments(kind: str, n: int, d: int, t: int, b: int = 2) -> list[Tensor]:
    """Return x, the parameters, and output, post and res of a pending write."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE)

    if kind == "hyper_connections":
        x_and_static = [normal(b, t, n, d), normal(n), normal(n), normal(n, n)]
        return [*x_and_static, 0.3 * normal(n + 2, d), normal(2), normal(b, t, d), normal(b, t, n), normal(b, t, n, n)]
    written = [normal(b, t, d), 2 * normal(b, t, n).sigmoid(), normal(b, t, n, n).softmax(-1)]
    m, norm = n * (n + 2), torch.linspace(0.5, 2, n * d, dtype=torch.float64, device=DEVICE)
    return [normal(b, t, n, d), 0.3 * normal(m, n * d), norm, normal(3), normal(m), *written]


def in_fp32(kind: str, n: int, d: int, t: int) -> list[Tensor]:
    return [x.float() for x in arguments(kind, n, d, t)]


def outputs_of(kind: str, inputs: list[Tensor], iterations: int = 20) -> tuple[Tensor, ...]:
    """inputs: those of `arguments`, without the last three if there is no pending write."""
    count = 1 + len(NAMES[kind])
    x, *parameters = inputs[:count]
    pending = Pending(*inputs[count:]) if inputs[count:] else None
    if kind == "mhc":
        return mhc_post_pre(x, pending, Parameters(*parameters), 1e-5, iterations)
    *static, w, scale = parameters
    return hyper_post_pre(x, pending, tuple(static), (w, scale), 1e-5)


def with_gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs from gradients of all outputs."""
    generator = torch.Generator().manual_seed(9)
    along = [torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, along)]


def results(kind: str, kernels: str, inputs: list[Tensor], pending: bool = True, iterations: int = 20) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (inputs if pending else inputs[:-3])]
    with using(kernels):
        outputs = outputs_of(kind, inputs, iterations)
    return with_gradients([*outputs], inputs)


def assert_same(kind: str, found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    of_inputs = (f"d {name}" for name in ("x", *NAMES[kind], "output", "post in", "res in"))
    assert_close(("input", "streams", "post", "res", *of_inputs), found, expected, tolerance)


def assert_exact(kind: str, inputs: list[Tensor], pending: bool = True, iterations: int = 20) -> None:
    """Compare the results in fp32 with the definition in fp64 of the same numbers."""
    found = results(kind, "triton", inputs, pending, iterations)
    assert_same(kind, found, results(kind, "naive", [x.double() for x in inputs], pending, iterations), 1e-5)


@of_both
@settings(max_examples=3)
@given(
    n=st.sampled_from([4, 2, 1, 3, 5, 8]), t=st.integers(1, 9), d=st.integers(1, 40), pending=st.booleans(),
    iterations=st.integers(1, 3),
)  # fmt: skip
def test_outputs_and_gradients_equal_the_definition(
    kind: str, n: int, t: int, d: int, pending: bool, iterations: int
) -> None:
    # the norm of a single number has a gradient near zero, a difference of large terms that fp32 cannot hold
    assert_exact(kind, in_fp32(kind, n, d if kind == "mhc" else max(2, d), t), pending, iterations)


# a chunk has 32 columns, and a program at most 32 positions
@pytest.mark.parametrize(("kind", "n", "d"), [("mhc", 2, 70), ("hyper_connections", 4, 40)])
def test_several_chunks_and_programs(kind: str, n: int, d: int) -> None:
    assert_exact(kind, in_fp32(kind, n, d, 17))


# DeepSeek-V4, and Hunyuan V4, whose H_res is the identity
SHIPPED = {False: Form(pre_eps=1e-2, res_eps=1e-2), True: Form(1.5, pre_eps=1e-2, post_eps=1e-2)}


def results_of_form(kernels: str, inputs: list[Tensor], pending: bool, identity: bool, late: bool) -> list[Tensor]:
    """Return the outputs and gradients of a norm without a weight, and without the inputs of an H_res of identity.

    late: whether the H_pre of the read is given.
    """
    n = inputs[0].shape[2]
    x, phi, _, alpha, bias, *written = inputs
    pres = [written[1].flip(1)] if late else []
    if identity:
        phi, alpha, bias, written = phi[: 2 * n], alpha[:2], bias[: 2 * n], written[:2]
    leaves = [y.detach().requires_grad_() for y in (*pres, x, phi, alpha, bias, *(written if pending else []))]
    pre, (x, phi, alpha, bias, *written) = leaves[0] if late else None, leaves[late:]
    waiting = Pending(*written, *[None] * identity) if pending else None
    with using(kernels):
        outputs = mhc_post_pre(x, waiting, Parameters(phi, None, alpha, bias), 1e-5, 4, False, SHIPPED[identity], pre)
    assert (outputs[3] is None) == identity
    return with_gradients([y for y in outputs if y is not None], leaves)


@pytest.mark.parametrize(
    ("n", "d", "pending", "identity", "late", "kernels"),
    [
        (4, 40, True, True, False, "triton"), (3, 7, True, False, False, "triton"),
        (4, 40, False, False, False, "triton"), (1, 5, False, True, False, "triton"),
        (3, 7, True, True, False, "torch"), (4, 40, True, False, False, "torch"),
        (2, 70, True, False, True, "triton"), (3, 7, False, False, True, "triton"), (1, 5, True, True, True, "triton"),
        (4, 40, True, False, True, "torch"), (3, 7, False, True, True, "torch"),
    ],
)  # fmt: skip
def test_the_forms_that_models_ship_with_equal_the_definition(
    n: int, d: int, pending: bool, identity: bool, late: bool, kernels: str
) -> None:
    inputs, double = low(arguments("mhc", n, d, 9), torch.float32)
    of_form = pending, identity, late
    found, expected = (results_of_form(*given, *of_form) for given in ((kernels, inputs), ("naive", double)))
    assert_close(map(str, range(13)), found, expected, 1e-5)


def test_a_given_pre_in_half_precision_is_close_to_fp64() -> None:
    half, double = low(arguments("mhc", 4, 24, 5), torch.float16)
    found, expected = (results_of_form(*given, True, False, True) for given in (("triton", half), ("naive", double)))
    assert_close(map(str, range(13)), found, expected, 8 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "pending"), [("mhc", True), ("hyper_connections", False)])
def test_half_precision_is_close_to_fp64(kind: str, pending: bool, dtype: torch.dtype) -> None:
    """The streams are rounded, and then the factors of the product."""
    half, double = low(arguments(kind, 4, 24, 5), dtype)
    found, expected = (results(kind, *given, pending) for given in (("triton", half), ("naive", double)))
    assert_same(kind, found, expected, 8 * torch.finfo(dtype).eps)


@of_both
def test_parameters_and_maps_may_be_in_fp32_beside_streams_of_16_bits(kind: str) -> None:
    half, double = low(arguments(kind, 4, 24, 5), torch.float16)
    inputs = [half[0], *(x.float() for x in half[1:-3]), half[-3], *(x.float() for x in half[-2:])]
    found, eps = results(kind, "triton", inputs), torch.finfo(torch.float16).eps
    assert [x.dtype for x in found[4:]] == [x.dtype for x in inputs]
    assert_same(kind, found, results(kind, "naive", double), 8 * eps)
    assert_same(kind, found, [x.double() for x in results(kind, "torch", inputs)], 4 * eps)


@of_both
def test_streams_stay_exact_under_autocast(kind: str) -> None:
    """Beside an output of a sublayer in fp16, the streams remain exact."""
    inputs = in_fp32(kind, 4, 24, 5)
    inputs[-3] = inputs[-3].half()
    with torch.autocast(DEVICE, torch.float16):
        found, expected = (results(kind, kernels, inputs) for kernels in ("triton", "torch"))
    assert [x.dtype for x in found] == [torch.float32] * 4 + [x.dtype for x in inputs]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
    assert_same(kind, found, [x.double() for x in expected], 4e-3)


def test_layout_does_not_matter() -> None:
    """Streams expanded from the embedding, and transposed parameters and outputs."""
    x, *parameters, output, post, res = in_fp32("hyper_connections", 4, 24, 5)
    turned = [y.mT.contiguous().mT if y.ndim == 2 else y for y in parameters]
    output = output.transpose(0, 1).contiguous().transpose(0, 1)
    assert_exact("hyper_connections", [x[:, :, :1].expand(-1, -1, 4, -1), *turned, output, post, res])


def test_a_weight_of_16_bits_at_an_odd_offset_is_copied() -> None:
    flat = torch.zeros(9, dtype=torch.bfloat16)
    assert triton_streams.align_words(flat[1:]).data_ptr() % 4 == 0
    assert triton_streams.align_words(flat[2:]).data_ptr() == flat[2:].data_ptr()


def test_unused_outputs_need_no_gradient() -> None:
    """The gradient of each sum is an expanded number."""
    inputs = [x.requires_grad_() for x in in_fp32("hyper_connections", 2, 8, 3)]
    grads = []
    for kernels in ("triton", "naive"):
        with using(kernels):
            outputs = outputs_of("hyper_connections", inputs)
        one_each = [torch.autograd.grad(y.sum(), inputs, retain_graph=True, allow_unused=True) for y in outputs]
        pairs = [pair for of_one in one_each for pair in zip(inputs, of_one, strict=True)]
        grads.append([torch.zeros_like(x) if grad is None else grad for x, grad in pairs])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_logits_stay_finite() -> None:
    inputs = in_fp32("mhc", 4, 24, 5)
    inputs[4] = 100 * inputs[4]
    found = results("mhc", "triton", inputs)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[3].sum(-1), torch.ones_like(found[3][..., 0]))


@in_parallel
@of_both
def test_results_are_bitwise_reproducible(kind: str) -> None:
    inputs = in_fp32(kind, 2, 8, 9)
    assert all(map(torch.equal, *(results(kind, "triton", inputs, iterations=3) for _ in range(2))))


def test_a_write_alone_returns_the_same_bits() -> None:
    x, *static, w, scale, output, post, res = in_fp32("hyper_connections", 4, 40, 9)
    new = hyper_triton.forward([x, output, post, res], [w, *static, scale], 1e-5)[1]
    assert torch.equal(triton_streams.write_streams([x, output, post, res]), new)
    n = 3
    x, phi, norm, alpha, bias, *written = in_fp32("mhc", n, 70, 9)
    settings = 1e-5, 1, list(PAPER), torch.float32, False
    identity = [phi[: 2 * n], bias[: 2 * n], alpha[:2]]
    for count, parameters in ((3, [phi, norm, bias, alpha]), (2, identity)):
        sources = [x, *written[:count]]
        new = mhc_triton.forward(sources, parameters, *settings)[1]
        assert torch.equal(triton_streams.write_streams(sources), new)


def test_static_maps_run_in_pytorch() -> None:
    x, *static = in_fp32("hyper_connections", 2, 8, 3)[:4]
    with using("triton"):
        read, streams, post, res = hyper_post_pre(x, None, tuple(static), None, 1e-5)
    assert streams is x
    torch.testing.assert_close(read, torch.einsum("j,btjd->btd", static[0], x))
    assert torch.equal(post, static[1].expand(2, 3, 2))
    assert torch.equal(res, static[2].expand(2, 3, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pending", "identity", "late"),
    [
        ("hyper_connections", True, False, False), ("mhc", True, False, False), ("mhc", False, True, False),
        ("mhc", True, False, True),
    ],
)  # fmt: skip
def test_operators_pass_opcheck(kind: str, pending: bool, identity: bool, late: bool) -> None:
    x, *parameters, output, post, res = (x.float() for x in arguments(kind, 2, 8, 3, b=1))
    sources, opcheck = [x, output, post, res] if pending else [x], torch.library.opcheck
    if kind == "mhc":
        (phi, norm, alpha, bias), module = parameters, mhc_triton
        parameters = [phi[:4], bias[:4], alpha[:2]] if identity else [phi, norm, bias, alpha]
        parameters = [post, *parameters] if late else parameters
        settings = 1e-5, 3, list(PAPER), torch.float32, late
    else:
        (*static, w, scale), module = parameters, hyper_triton
        parameters, settings = [w, *static, scale], (1e-5,)
    opcheck(module.forward, (sources, parameters, *settings))
    read, new, *outputs = module.forward(sources, parameters, *settings)
    count = (1 if identity else 2) + late
    maps, kept = outputs[:count], outputs[count:]
    grads = [torch.ones_like(read), torch.ones_like(new), *maps]
    opcheck(module.backward, (grads, sources, new if pending else x, parameters, kept, *settings))
    if pending:
        opcheck(triton_streams.write_streams, (sources,))


def test_invalid_arguments_are_refused() -> None:
    for kind, which, change, words in (
        ("mhc", 1, lambda phi: phi[:-1], r"phi is \[23, 32\], must be \[24, 32\]"),
        ("mhc", 5, lambda y: y[:, :2], r"output is \[2, 2, 8\], must be \[2, 3, 8\]"),
        ("mhc", 7, lambda res: res[..., :3], r"res is \[2, 3, 4, 3\], must be \[2, 3, 4, 4\]"),
        ("mhc", 5, lambda y: y.to("meta"), "output is on meta"),
        ("mhc", 3, lambda alpha: alpha.double(), "float64 is not fp32, fp16 or bf16"),
        ("hyper_connections", 4, lambda w: w[:-1], r"w is \[5, 8\], must be \[6, 8\]"),
        ("hyper_connections", 3, lambda res: res[:-1], r"static_res is \[3, 4\], must be \[4, 4\]"),
    ):
        inputs = in_fp32(kind, 4, 8, 3)
        inputs[which] = change(inputs[which])
        with pytest.raises(ValueError, match=words):
            results(kind, "triton", inputs)
    x, *parameters = in_fp32("mhc", 4, 8, 3)[:5]
    with using("triton"), pytest.raises(ValueError, match=r"pre is \[2, 3, 3\], must be \[2, 3, 4\]"):
        mhc_post_pre(x, None, Parameters(*parameters), 1e-5, 3, pre_btn=x[..., :3, 0])


@of_both
def test_too_many_streams_are_refused(kind: str) -> None:
    inputs = in_fp32(kind, 9, 8, 3)
    with pytest.raises(ValueError, match="num_streams=9 is above 8"):
        results(kind, "triton", inputs)
    assert len(results(kind, "auto", inputs)) == 4 + len(inputs)
