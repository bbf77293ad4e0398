"""The outputs and all gradients of the Triton kernels of reads over depth equal those of the definitions."""

import gc
import inspect
import weakref
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

from .compiling import compile_launches

reads_triton = pytest.importorskip("depthlm.ops.reads_triton")
attend_ops = pytest.importorskip("depthlm.ops.attention_residuals.triton")
from depthlm.ops.attention_residuals import one_triton  # noqa: E402
from depthlm.ops.dca import triton as gated_triton  # noqa: E402
from depthlm.ops.denseformer import triton as weighted_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READS = ("attend", "weighted", "gated")
# Triton's interpreter takes time for every position and source, so it gets few of them, in programs of few
TOKENS, ROWS = (9, 16) if DEVICE == "cuda" else (4, 3)
KERNELS = {
    reads_triton: ("reads_write_table",),
    attend_ops: ("attention_residuals_forward", "attention_residuals_backward"),
    one_triton: ("attention_residuals_one_forward", "attention_residuals_one_backward"),
    gated_triton: (
        "dca_scores",
        "dca_forward",
        "dca_score_grads",
        "dca_source_grads",
        "dca_bias_grads",
        "dca_gate_grads",
    ),
    weighted_triton: ("denseformer_forward", "denseformer_backward"),
}
# one read and several, of sources of two dtypes, forward and backward
LAUNCHES = """
from depthlm.ops.attention_residuals.triton import depth_attend
from depthlm.ops.dca.triton import gated
from depthlm.ops.denseformer.triton import weighted

sources = [torch.zeros(40, 2048, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.bfloat16)]
for reads in (1, 2):
    query, weights, bias, start, lse = (
        torch.zeros(reads, *shape, requires_grad=True) for shape in ((2048,), (2,), (2, 2048), (40, 2048), (40,))
    )
    attended = depth_attend(query, sources, 1e-5, weights[0], (start, lse))
    outputs = [*attended, weighted(weights, sources, start), gated(bias, bias, sources, start)]
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])
"""
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
    """Compare the results of Triton with those of the definition in float64, and return the former."""
    found, expected = results(kind, "triton", arguments), results(kind, "naive", arguments, torch.float64)
    largest = max(y.abs().max().item() for y in expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        # a small gradient may be the difference of terms as large as the other results
        scale = max(y.abs().max().item(), 0.1 * largest)
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * scale)
    return found


@pytest.mark.parametrize("kind", READS)
@settings(max_examples=3)
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
    """One tile has 64 dimensions, and up to 32 positions. Two programs of the backward pass have several tiles each."""
    arguments = tensors(kind, 3, 2, 25, 70, started=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (attend_ops, gated_triton, weighted_triton):
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
@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize(("reads", "started"), [(1, True), (2, False), (2, True)])
def test_launches_pass_opcheck(kind: str, reads: int, started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(launch: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            torch.library.opcheck(launch, arguments)
            launch(*arguments)

        return run

    for module in (attend_ops, one_triton, weighted_triton, gated_triton):
        monkeypatch.setattr(module, "KERNELS", module.KERNELS._replace(forward=checked(module.forward)))
        monkeypatch.setattr(module, "launch_backward", checked(module.launch_backward))
    results(kind, "triton", tensors(kind, reads, 2, 3, 8, started))


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
        attend_ops.depth_attend(q.long(), [x], 1e-5, None, None)


@pytest.mark.slow
def test_the_kernels_compile_for_gpus() -> None:
    compile_launches(LAUNCHES)


def test_a_source_is_freed_with_its_last_reader() -> None:
    source = normal(2, 3, 8)
    freed = weakref.ref(source)
    with using("triton"), torch.no_grad():
        for kind in READS:
            read(kind, tensors(kind, 1, 1, 2, 8, started=False)["parameters"], [source], ())
    # what is attached to a source does not refer to it, so that no garbage collection is necessary
    gc.disable()
    try:
        del source
        assert freed() is None
    finally:
        gc.enable()
