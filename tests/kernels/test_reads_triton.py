"""The outputs and all gradients of the Triton kernels of reads over depth equal those of the PyTorch references."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthlm.kernels.attention_residuals.reference import depth_attend
from depthlm.kernels.backend import using
from depthlm.kernels.gated_residuals.reference import gated_reads, weighted_reads

from .compiling import compile_kernels

attend_ops = pytest.importorskip("depthlm.kernels.attention_residuals.triton")
sums_ops = pytest.importorskip("depthlm.kernels.gated_residuals.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READS = ("attend", "weighted", "gated")
# Triton's interpreter takes time for every position and source, so it gets few of them, in programs of few
TOKENS, ROWS = (9, 16) if DEVICE == "cuda" else (4, 3)
# the weighted sums are half of the gated ones
QUICK_FIRST = ("attend", pytest.param("weighted", marks=pytest.mark.slow), "gated")


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Iterator[None]:
    """Several programs for few positions, the last of which is not full."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attend_ops, sums_ops):
            patch.setattr(module, "ROWS", ROWS)
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
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * y.abs().max().item())
    return found


@pytest.mark.parametrize("kind", READS)
@settings(max_examples=4, deadline=None)
@given(
    reads=st.integers(1, 8), n=st.integers(1, 5), t=st.integers(1, TOKENS), d=st.integers(1, 33), started=st.booleans()
)
def test_reads_equal_the_reference(kind: str, reads: int, n: int, t: int, d: int, started: bool) -> None:
    assert_same(kind, tensors(kind, reads, n, t, d, started))


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_more_sources_than_one_launch_supports(kind: str) -> None:
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
def test_chain_of_launches_rounds_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_ops, "MAX_SOURCES", 4)
    monkeypatch.setattr(sums_ops, "MAX_SOURCES", 4)
    arguments = tensors(kind, 1, 9, 1, 4, started=False)
    arguments["sources"] = [x.half() for x in arguments["sources"]]
    assert assert_same(kind, arguments, 2e-3)[0].dtype == torch.float16
    arguments["sources"][0] = arguments["sources"][0].float()
    assert results(kind, "triton", arguments)[0].dtype == torch.float32


@pytest.mark.parametrize("kind", QUICK_FIRST)
def test_more_reads_than_fit_into_registers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_ops, "TILE", 24)
    monkeypatch.setattr(sums_ops, "TILE", 24)
    assert_same(kind, tensors(kind, 5, 3, 2, 8, started=True))


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
    for start in ((None, None), (out, lse)):
        bias = None if start[0] is None else normal(2)
        torch.library.opcheck(attend_ops.forward, (q, xs, 1e-5, bias, *start, torch.float32))
        detached = q.detach(), [x.detach() for x in xs]
        torch.library.opcheck(attend_ops.backward, (out, lse, out, lse, *detached, 1e-5, bias, *start))
    weights, gate = normal(2, 2, 8).requires_grad_(), normal(2, 2, 8)
    for arguments in ((weights, gate), (weights[:, :, 0].detach().requires_grad_(), None)):
        torch.library.opcheck(sums_ops.forward, (*arguments, xs, out, torch.float16))
        torch.library.opcheck(sums_ops.backward, (out, arguments[0].detach(), arguments[1], [x.detach() for x in xs]))


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
    sources, sizes = ["*fp32", *["*bf16"] * 15], {"S": 8, "D": 2048}
    counts = {"n": "i32", "positions": "i32", "rows": "i32", "d": "i32", "reads": "i32"}
    read_from = {"x_ptrs": sources, "query_ptr": "*fp32", "bias_ptr": "*fp32", "start_ptr": "*fp32",
                 "start_lse_ptr": "*fp32", "out_ptr": "*fp32", "lse_ptr": "*fp32", **counts}  # fmt: skip
    backward = {**read_from, "grad_ptr": "*fp32", "grad_lse_ptr": "*fp32", "grad_x_ptrs": sources,
                "partial_dq_ptr": "*fp32", "partial_dbias_ptr": "*fp32", "grad_start_ptr": "*fp32",
                "grad_start_lse_ptr": "*fp32"}  # fmt: skip
    switches = {**sizes, "EPS": 1e-5, "NORMED": True, "BIAS": True, "START": True}
    compile_kernels(
        attend_ops.__name__, [("_forward", read_from, switches), ("_backward", backward, switches)], warps=16
    )
    sums = {"x_ptrs": sources, "weights_ptr": "*fp32", "gate_ptr": "*fp32", "start_ptr": "*fp32", "out_ptr": "*fp32",
            "grad_ptr": "*fp32", "grad_x_ptrs": sources, "partial_dweights_ptr": "*fp32", "partial_dgate_ptr": "*fp32",
            **counts}  # fmt: skip
    kernels = [
        (name, sums, {**sizes, "GATED": gated, **({"START": True} if name == "_forward" else {})})
        for name in ("_forward", "_backward")
        for gated in (True, False)
    ]
    compile_kernels(sums_ops.__name__, kernels, warps=16)
