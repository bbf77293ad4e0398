"""The outputs and all gradients of the Triton kernels of reads over depth equal those of the PyTorch references."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.backend import using
from depthlm.ops.dca.naive import gated_reads
from depthlm.ops.denseformer.naive import weighted_reads

from .compiling import compile_kernels

reads_triton = pytest.importorskip("depthlm.ops.reads_triton")
attend_ops = pytest.importorskip("depthlm.ops.attention_residuals.triton")
from depthlm.ops.attention_residuals import many_triton, one_triton  # noqa: E402
from depthlm.ops.dca import triton as gated_triton  # noqa: E402
from depthlm.ops.denseformer import triton as weighted_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READS = ("attend", "weighted", "gated")
# Triton's interpreter takes time for every position and source, so it gets few of them, in programs of few
TOKENS, ROWS = (9, 16) if DEVICE == "cuda" else (4, 3)
KERNELS = {
    reads_triton: ("_write_table", "_scores"),
    many_triton: ("_softmax", "_forward", "_score_grads", "_source_grads"),
    one_triton: ("_forward", "_backward"),
    gated_triton: ("_forward", "_score_grads", "_source_grads", "_parameter_grads"),
    weighted_triton: ("_forward", "_backward"),
}
# the weighted sums are half of the gated ones
QUICK_FIRST = ("attend", pytest.param("weighted", marks=pytest.mark.slow), "gated")


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Iterator[None]:
    """Several programs for few positions, the last of which is not full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_triton, "ROWS", ROWS)
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensors(kind: str, reads: int, n: int, t: int, d: int, started: bool) -> dict[str, Any]:
    """Return the arguments of a read."""
    sources = [normal(2, t, d, seed=j) for j in range(1, n + 1)]
    start = normal(reads, 2, t, d, seed=91)
    if kind == "attend":
        bias = normal(n, seed=92) if started else None
        starts = (start, normal(reads, 2, t, seed=93)) if started else ()
        return {"parameters": [normal(reads, d), bias], "sources": sources, "start": starts}
    shape = (reads, n) if kind == "weighted" else (reads, n, d)
    parameters = [normal(*shape), *([normal(*shape, seed=94)] if kind == "gated" else [])]
    return {"parameters": parameters, "sources": sources, "start": (start,) if started else ()}


def read(kind: str, parameters: Sequence[Any], sources: Sequence[Tensor], start: Sequence[Tensor]) -> Sequence[Tensor]:
    if kind == "attend":
        query, bias = parameters
        return depth_attend(query, sources, 1e-5, bias, (start[0], start[1]) if start else None)
    operator: Callable[..., Tensor] = weighted_reads if kind == "weighted" else gated_reads
    return [operator(*parameters, sources, start[0] if start else None)]


def results(kind: str, kernels: str, arguments: dict[str, Any], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs."""
    made = {
        name: [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in part]
        for name, part in arguments.items()
    }
    with using(kernels):
        outputs = read(kind, **made)
    inputs = [x for part in made.values() for x in part if x is not None]
    grads = [normal(*x.shape, seed=95 + i).to(x.dtype) for i, x in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


def assert_same(kind: str, arguments: dict[str, Any], tolerance: float = 1e-5) -> list[Tensor]:
    """Compare the results of Triton with those of PyTorch in float64, and return the former."""
    found, expected = results(kind, "triton", arguments), results(kind, "torch", arguments, torch.float64)
    largest = max(y.abs().max().item() for y in expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        # a small gradient may be the difference of terms as large as the other results
        scale = max(y.abs().max().item(), 0.1 * largest)
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * scale)
    return found


@pytest.mark.parametrize("kind", READS)
@settings(max_examples=4, deadline=None)
@given(
    reads=st.integers(1, 8), n=st.integers(1, 5), t=st.integers(1, TOKENS), d=st.integers(1, 33), started=st.booleans()
)
def test_reads_equal_the_reference(kind: str, reads: int, n: int, t: int, d: int, started: bool) -> None:
    assert_same(kind, tensors(kind, reads, n, t, d, started))


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_more_sources_than_one_table_launch_takes(kind: str) -> None:
    assert_same(kind, tensors(kind, 2, 18, 1, 8, started=True))


@pytest.mark.parametrize("kind", QUICK_FIRST)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 3e-3),
        pytest.param(torch.bfloat16, 2e-2, marks=pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")),
    ],
)
def test_16_bit_sources_with_one_wider_source(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    arguments = tensors(kind, 3, 3, 2, 16, started=False)
    arguments["sources"][1:] = [x.to(dtype) for x in arguments["sources"][1:]]
    found = assert_same(kind, arguments, tolerance)
    assert [x.dtype for x in found] == [x.dtype for x in results(kind, "torch", arguments)]
    narrow = {**arguments, "sources": arguments["sources"][1:]}
    narrow["parameters"] = tensors(kind, 3, 2, 2, 16, started=False)["parameters"]
    assert results(kind, "triton", narrow)[0].dtype == dtype


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_several_tiles_of_positions_and_dimensions(kind: str) -> None:
    """One tile has 64 dimensions, and 32 or 16 positions. Two programs of the backward pass have several tiles each."""
    arguments = tensors(kind, 3, 2, 25, 70, started=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (reads_triton, weighted_triton):
            patch.setattr(module, "PROGRAMS", 2)
        assert_same(kind, arguments)


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_more_reads_than_one_launch_supports(kind: str) -> None:
    assert_same(kind, tensors(kind, 9, 2, 1, 8, started=True))


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_fp16_with_bf16_is_computed_in_fp32(kind: str) -> None:
    arguments = tensors(kind, 2, 2, 1, 8, started=False)
    arguments["sources"] = [arguments["sources"][0].half(), arguments["sources"][1].bfloat16()]
    found = assert_same(kind, arguments, 1e-2)
    assert found[0].dtype == torch.float32


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_sources_at_any_address(kind: str) -> None:
    """The kernels load 16 bytes at once, which an address that is no multiple of 16 does not allow."""
    arguments = tensors(kind, 2, 2, 2, 8, started=False)
    arguments["sources"] = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in arguments["sources"]]
    assert_same(kind, arguments)
    shifted = arguments["sources"][0]
    assert shifted.storage_offset() == 1
    assert reads_triton.aligned(shifted).storage_offset() == 0


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_strided_sources_and_a_source_used_twice(kind: str) -> None:
    arguments = tensors(kind, 2, 3, 2, 8, started=False)
    arguments["sources"] = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in arguments["sources"]]
    assert_same(kind, arguments)
    x = normal(2, 2, 8).requires_grad_()
    with using("triton"):
        twice = torch.autograd.grad(read(kind, arguments["parameters"], [x, x, x], ())[0].sum(), x)
    with using("torch"):
        expected = torch.autograd.grad(read(kind, arguments["parameters"], [x, x, x], ())[0].sum(), x)
    torch.testing.assert_close(twice, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_results_are_bitwise_reproducible(kind: str) -> None:
    arguments = tensors(kind, 2, 2, 12 if DEVICE == "cuda" else 4, 8, started=True)
    for x, y in zip(*(results(kind, "triton", arguments) for _ in range(2)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
def test_operators_pass_opcheck() -> None:
    q, xs, out, lse = (normal(2, 8).requires_grad_(), [normal(3, 8).requires_grad_(), normal(3, 8)],
                       normal(2, 3, 8), normal(2, 3))  # fmt: skip
    detached, opcheck = [x.detach() for x in xs], torch.library.opcheck
    sums = [torch.zeros_like(x) for x in detached], [False, True]
    for starts in ((None, None), (out, lse)):
        bias = None if starts[0] is None else normal(2)
        opcheck(many_triton.forward, (q, xs, 1e-5, bias, *starts, torch.float32, []))
        saved = many_triton.forward(q.detach(), detached, 1e-5, bias, *starts, torch.float32, [])
        opcheck(many_triton.backward, (out, lse, *saved[1:], q.detach(), detached, True, bias, *starts, *sums))
        one = [None if x is None else x[0] for x in starts]
        opcheck(one_triton.forward, (q[0].detach().requires_grad_(), xs, 1e-5, bias, *one, torch.float32, []))
        of_one = (out[0], lse[0], out[0], lse[0], q[0].detach(), detached, 1e-5, bias,
                  None if bias is None else torch.float32, one[1], *sums)  # fmt: skip
        opcheck(one_triton.backward, of_one)
    weights, gate = normal(2, 2, 8), normal(2, 2, 8)
    opcheck(gated_triton.forward, (weights.clone().requires_grad_(), gate, xs, out, torch.float16, []))
    score = gated_triton.forward(weights, gate, detached, out, torch.float32, [])[1]
    opcheck(gated_triton.backward, (out, weights, gate, score, detached, *sums))
    opcheck(weighted_triton.forward, (weights[:, :, 0].clone().requires_grad_(), xs, out, torch.float16, []))
    opcheck(weighted_triton.backward, (out, weights[:, :, 0], detached, *sums))


@pytest.mark.parametrize("kernel", [getattr(module, name) for module, names in KERNELS.items() for name in names])
def test_numbers_do_not_select_a_compilation(kernel: Any) -> None:
    """Triton compiles a kernel again for each number that is 1 or a multiple of 16, unless the number is excluded."""
    names = inspect.signature(kernel.fn).parameters
    numbers = {name for name in names if not name.endswith(("_ptr", "_ptrs")) and not name.isupper()}
    assert numbers <= {*reads_triton.COUNTS}


def test_invalid_arguments_are_refused() -> None:
    q, x = normal(2, 8), normal(3, 5, 8)
    with using("triton"):
        with pytest.raises(ValueError, match=r"source 1 is \[3, 5, 7\], must be \[3, 5, 8\]"):
            depth_attend(q, [x, x[..., :7]], 1e-5)
        with pytest.raises(ValueError, match=r"bias is \[3\], must be \[1\]"):
            depth_attend(q, [x], 1e-5, normal(3))
        with pytest.raises(ValueError, match=r"start of lse is \[2, 3\], must be \[2, 3, 5\]"):
            depth_attend(q, [x], 1e-5, None, (normal(2, 3, 5, 8), normal(2, 3)))
        with pytest.raises(ValueError, match="float64 is not fp32, fp16 or bf16"):
            depth_attend(q.double(), [x.double()], 1e-5)
        with pytest.raises(ValueError, match="source 0 is on meta, must be on"):
            depth_attend(q, [x.to("meta")], 1e-5)
        with pytest.raises(ValueError, match=r"weights is \[2, 8\], must be \[2, 1\]"):
            weighted_reads(q, [x])
        with pytest.raises(ValueError, match=r"gate is \[2, 1, 7\], must be \[2, 1, 8\]"):
            gated_reads(normal(2, 1, 8), normal(2, 1, 7), [x])
        with pytest.raises(ValueError, match=r"start is \[2, 5, 8\], must be \[2, 3, 5, 8\]"):
            weighted_reads(normal(2, 1), [x], normal(2, 5, 8))
    with pytest.raises(TypeError, match=r"query is torch\.int64, must be fp32"):
        attend_ops.attend(q.long(), [x], 1e-5, None, None)


@pytest.mark.slow
def test_the_kernels_compile_for_gpus() -> None:
    d, tile = {"D": 2048}, {"R": 32, "C": 64}
    narrow, normed = {"NARROW": "bfloat16"}, {"EPS": 1e-5, "NORMED": True}
    eight, dot = {"S": 8}, {"DOT_S": 16}
    tables = {"table_ptr": "*i64", "x_ptrs": ["*u8"] * 16, "grad_ptrs": ["*u8"] * 16}
    given = ("query", "bias", "gate", "weights", "start", "out", "grad", "grad_start")
    fp32 = ("raw", "scale", "weight", "score", "lse", "start_lse", "grad_lse", "grad_start_lse", "grad_score",
            "grad_raw", "product", "along", "partial", "partial_bias", "partial_query")  # fmt: skip
    types = {**tables, **{f"{name}_ptr": "*fp32" for name in (*given, *fp32)},
             **dict.fromkeys(reads_triton.COUNTS, "i32")}  # fmt: skip
    half = {"R": 16, "C": 64}
    scored = {**d, "R": 64, "C": 64, "S": 16, **narrow, "PER_SOURCE": False, **normed}
    for module, warps, kernels in (
        (reads_triton, 4, {"_scores": scored, "_write_table": {}}),
        (weighted_triton, 8, {"_forward": {**d, **tile, **eight, **narrow}}),
        (weighted_triton, 2, {"_backward": {**d, "V": 64, "S": 16, "N": 16, **narrow}}),
        (gated_triton, 8, {name: {**d, **tile, **eight, **narrow} for name in ("_forward", "_score_grads")}),
        (gated_triton, 4, {"_source_grads": {**d, **tile, **eight, **dot, **narrow},
                           "_parameter_grads": {**d, **half, "S": 3, **dot, "J": 3, **narrow}}),
        (many_triton, 8, {"_forward": {**d, **tile, **eight, **narrow},
                          "_score_grads": {**d, **tile, **eight, **narrow, "NORMED": True}}),
        (many_triton, 4, {"_softmax": {"R": 128, **eight}, "_source_grads": {**d, **half, **eight, **dot, **narrow}}),
        (one_triton, 4, {name: {"WIDTH": 1536, **d, **normed, **narrow} for name in ("_forward", "_backward")}),
    ):  # fmt: skip
        compile_kernels(module.__name__, [(name, types, values) for name, values in kernels.items()], warps)
