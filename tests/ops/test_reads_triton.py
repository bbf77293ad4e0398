"""The outputs and all gradients of the Triton kernels of reads over depth equal those of the definitions."""

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.backend import using
from depthlm.ops.dca.naive import gated_reads
from depthlm.ops.denseformer.naive import weighted_reads

from .depth_reads import READS, Arguments, parameters_of, read, results, tensors
from .inputs import DEVICE, in_parallel
from .inputs import single as normal

reads_triton = pytest.importorskip("depthlm.ops.reads_triton")
attend_ops = pytest.importorskip("depthlm.ops.attention_residuals.triton")
from depthlm.ops.attention_residuals import few_triton  # noqa: E402
from depthlm.ops.dca import triton as gated_triton  # noqa: E402
from depthlm.ops.denseformer import triton as weighted_triton  # noqa: E402

# Triton's interpreter takes time for every position and source, so it gets few of them
TOKENS = 9 if DEVICE == "cuda" else 4
MODULES = (attend_ops, few_triton, gated_triton, weighted_triton)
# the weighted sums are half of the gated ones
QUICK_FIRST = ("attend", pytest.param("weighted", marks=pytest.mark.slow), "gated")


def assert_same(kind: str, arguments: Arguments, tolerance: float = 1e-5) -> list[Tensor]:
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
@pytest.mark.parametrize(
    ("reads", "n", "t", "d", "started"), [(1, 1, 1, 1, False), (1, 4, TOKENS, 33, True), (3, 3, 2, 17, False)]
)
def test_reads_equal_the_definition(kind, reads, n, t, d, started):
    assert_same(kind, tensors(kind, reads, n, t, d, started))


# a launch takes 8 reads, and a table launch 16 sources
@pytest.mark.parametrize(
    ("kind", "reads", "n", "started"),
    [
        ("attend", 2, 18, True),
        ("attend", 2, 34, True),
        ("attend", 2, 65, False),
        ("attend", 9, 2, False),
        ("gated", 9, 2, True),
    ],
)
def test_more_reads_or_sources_than_one_launch_takes(kind, reads, n, started):
    assert_same(kind, tensors(kind, reads, n, 1, 8, started))


@pytest.mark.parametrize("kind", QUICK_FIRST)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 3e-3),
        pytest.param(torch.bfloat16, 2e-2, marks=pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")),
    ],
)
def test_16_bit_sources_with_one_wider_source(kind, dtype, tolerance):
    arguments = tensors(kind, 3, 3, 2, 16, started=False)
    arguments["sources"][1:] = [x.to(dtype) for x in arguments["sources"][1:]]
    found = assert_same(kind, arguments, tolerance)
    assert [x.dtype for x in found] == [x.dtype for x in results(kind, "torch", arguments)]
    narrow = {"parameters": parameters_of(kind, 3, 2, 16), "sources": arguments["sources"][1:], "start": ()}
    assert results(kind, "triton", narrow)[0].dtype == dtype


@pytest.mark.parametrize(
    ("kind", "d", "started"),
    [pytest.param("attend", 70, True, marks=pytest.mark.slow), ("attend", 130, False), ("gated", 70, True)],
)
def test_several_tiles_of_positions_and_dimensions(kind, d, started):
    """One tile has up to 128 dimensions and 32 positions. Two programs of a backward pass have several tiles each."""
    arguments = tensors(kind, 2, 2, 17, d, started)
    with pytest.MonkeyPatch.context() as patch:
        for module in (attend_ops, few_triton, gated_triton):
            patch.setattr(module, "PROGRAMS", 2)
        patch.setattr(gated_triton, "ALL_PROGRAMS", 2)
        assert_same(kind, arguments)


def test_fp16_with_bf16_is_computed_in_fp32():
    arguments = tensors("gated", 2, 2, 1, 8, started=False)
    arguments["sources"] = [arguments["sources"][0].half(), arguments["sources"][1].bfloat16()]
    assert assert_same("gated", arguments, 1e-2)[0].dtype == torch.float32


def test_sources_at_any_address_and_in_any_layout():
    """The kernels load 16 bytes at once, which an address that is no multiple of 16 does not allow."""
    arguments = tensors("weighted", 2, 3, 2, 8, started=False)
    *shifted, last = arguments["sources"]
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in shifted]
    arguments["sources"] = [*shifted, last.transpose(0, 1).contiguous().transpose(0, 1)]
    assert_same("weighted", arguments)
    assert shifted[0].storage_offset() == 1
    assert reads_triton.align(shifted[0]).storage_offset() == 0


@in_parallel
@pytest.mark.parametrize("kind", READS)
def test_results_are_bitwise_reproducible(kind):
    arguments = tensors(kind, 2, 2, 12, 8, started=True)
    assert all(map(torch.equal, *(results(kind, "triton", arguments) for _ in range(2))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reads", "started"),
    [
        ("attend", 1, True),
        ("attend", 2, False),
        ("attend", 2, True),
        ("weighted", 2, True),
        ("gated", 2, True),
        ("gated", 1, False),
    ],
)
def test_launches_pass_opcheck(kind, reads, started, monkeypatch):
    def checked(launch: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            torch.library.opcheck(launch, arguments)
            launch(*arguments)

        return run

    for module in MODULES:
        monkeypatch.setattr(module, "KERNELS", module.KERNELS._replace(forward=checked(module.forward)))
        monkeypatch.setattr(module, "launch_backward", checked(module.launch_backward))
    results(kind, "triton", tensors(kind, reads, 2, 3, 8, started))


def test_numbers_do_not_select_a_compilation():
    """Triton compiles a kernel again for each number that is 1 or a multiple of 16, unless the number is excluded."""
    prefixes = ("reads_write_table", "attention_residuals_", "dca_", "denseformer_")
    named = {name: x for module in (reads_triton, *MODULES) for name, x in vars(module).items() if hasattr(x, "fn")}
    kernels = {name: kernel for name, kernel in named.items() if name.startswith(prefixes)}
    assert len(kernels) == 13
    for name, kernel in kernels.items():
        arguments = inspect.signature(kernel.fn).parameters
        numbers = {x for x in arguments if not x.endswith(("_ptr", "_ptrs")) and not x.isupper()}
        assert numbers <= {*reads_triton.COUNTS}, name


def test_invalid_arguments_are_refused():
    q, x = normal(2, 8), normal(3, 5, 8)
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        (depth_attend, (q, [x, x[..., :7]], 1e-5), r"source 1 is \[3, 5, 7\], must be \[3, 5, 8\]"),
        (depth_attend, (q.double(), [x.double()], 1e-5), "float64 is not fp32, fp16 or bf16"),
        (depth_attend, (q, [x.to("meta")], 1e-5), "source 0 is on meta, must be on"),
        (gated_reads, (normal(2, 1, 8), normal(2, 1, 7), [x]), r"gate is \[2, 1, 7\], must be \[2, 1, 8\]"),
        (weighted_reads, (normal(2, 1), [x], q), r"start is \[2, 8\], must be \[2, 3, 5, 8\]"),
    ]
    for operator, arguments, message in refused:
        with using("triton"), pytest.raises(ValueError, match=message):
            operator(*arguments)
    with pytest.raises(TypeError, match=r"query is torch\.int64, must be fp32"):
        attend_ops.depth_attend(q.long(), [x], 1e-5, None, None)


def test_a_source_is_freed_with_its_last_reader():
    source = normal(2, 3, 8)
    freed = weakref.ref(source)
    with using("triton"), torch.no_grad():
        for kind in READS:
            read(kind, parameters_of(kind, 1, 1, 8), [source], ())
    # what is attached to a source does not refer to it, so that no garbage collection is necessary
    gc.disable()
    try:
        del source
        assert freed() is None
    finally:
        gc.enable()
