"""Proves the machine itself: it finds known faults, and none in their corrected versions.

python -m tests.ptx_machine.prove [--quick]
"""

import sys
import tempfile

from .launcher import Launcher

LAUNCHER = Launcher()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from . import faulty, ptx  # noqa: E402
from .grid import launch  # noqa: E402
from .machine import Program  # noqa: E402
from .reports import Reports  # noqa: E402


def run(kernel, grid, arguments, expected=None, fixed=False, **constants):
    """Launch a kernel; return the faults, and whether the result was right. fixed: leave the arguments as they are."""
    tensors = [] if fixed else [x for x in arguments if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    LAUNCHER.begin()
    kernel[grid](*arguments, num_warps=4, **constants)
    right = expected is None or bool(torch.allclose(expected[0], expected[1], rtol=1e-5, atol=1e-5))
    for x, y in zip(tensors, before, strict=True):
        x.copy_(y)
    return [*LAUNCHER.reports.faults], right


def expect(name: str, words: str, kernel, grid, *arguments, constant: tuple[str, bool], **options) -> None:
    """words: of a fault that the kernel must have with this constant, and not with its opposite; none: a wrong result.

    options: as of `run`.
    """
    key, value = constant
    wrong, right = (run(kernel, grid, arguments, **{key: x}, **options) for x in (value, not value))
    assert any(words in fault for fault in wrong[0]) if words else not wrong[1], f"{name} is not found: {wrong}"
    assert right == ([], True), f"without {name}: {right}"
    print(f"found: {name}")


def faults() -> None:
    torch.manual_seed(0)
    B = 256
    x, y = torch.randn(B), torch.zeros(2 * B)
    words, options = "race between warps, read after write of global", {"B": B, "expected": (y[B:], 2 * x.flip(0))}
    missing = ("BARRIER", False)
    expect("a missing barrier between write and read", words, faulty.exchange, (1,), x, y, constant=missing, **options)
    words = "race between warps, write after read of global"
    expect("a missing barrier between read and write", words, faulty.overwrite, (1,), x, constant=missing, B=B)
    x, y = torch.randn(300), torch.zeros(300)
    options = {"B": 128, "expected": (y, 2 * x), "constant": ("WRONG", True)}
    expect("a load out of bounds", "out of bounds", faulty.scale, (3,), x, y, 300, **options)
    y = torch.zeros(300, dtype=torch.int32)
    expect("a store out of bounds", "out of bounds", faulty.store_all, (3,), y, 300, constant=("WRONG", True), B=128)
    x, y = torch.arange(8.0 * 128), torch.zeros(8)
    options = {"B": 128, "expected": (y, x.view(8, 128).sum(1)), "constant": ("APART", False)}
    expect("a race between programs", "race between programs", faulty.total, (8,), x, y, **options)
    x, y = torch.randn(5, 100), torch.zeros(5)
    options = {"B": 128, "expected": (y, x.sum(1)), "constant": ("OTHER", False)}
    expect("a reduction over a padded tail without `other`", "", faulty.row_sums, (5,), x, y, 100, **options)
    # as far apart as 2^31 numbers of 8 bits; only what is touched takes memory
    with tempfile.TemporaryFile() as file:
        x = torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=3 * 2**30 + 64))
    options = {"B": 64, "fixed": True, "constant": ("WIDE", False)}
    given = x, torch.zeros(4 * 64, dtype=torch.uint8), 3 * 2**29
    expect("an offset that does not fit into 32 bits", "out of bounds", faulty.far, (3,), *given, **options)
    y, out = torch.empty(B), torch.zeros(1)
    options = {"B": B, "expected": (out, torch.tensor([float(B)])), "constant": ("WRITTEN", False)}
    expect("a read of memory that nobody wrote", "", faulty.unwritten, (1,), y, out, **options)


SHARED = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry shared(
	.param .u64 .ptr .global .align 1 shared_param_0
)
.reqntid 128
{
	.reg .pred %p<4>;
	.reg .b32 %r<20>;
	.reg .b64 %rd<8>;
	ld.param.b64 %rd1, [shared_param_0];
	mov.u32 %r1, %tid.x;
	shl.b32 %r2, %r1, 2;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, %r2;
	st.shared.b32 [%r4], %r1;
	BARRIER
	xor.b32 %r5, %r2, 508;
	add.s32 %r6, %r3, %r5;
	ld.shared.b32 %r7, [%r6];
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	st.global.b32 [%rd3], %r7;
	setp.lt.u32 %p1, %r1, 50;
	@%p1 bra $L__BB0_2;
	bra.uni $L__BB0_3;
$L__BB0_2:
	add.s32 %r7, %r7, 1000;
	st.global.b32 [%rd3], %r7;
$L__BB0_3:
	ret;
}
"""


def shared_memory() -> None:
    """A kernel in PTX: threads exchange numbers through shared memory, and half of a warp takes a branch."""
    for barrier in ("", "bar.sync 0;"):
        program, reports = Program(ptx.parse(SHARED.replace("BARRIER", barrier))), Reports(kernel="shared")
        out = np.zeros(128, np.int32)
        address = out.ctypes.data
        parameters = {"shared_param_0": address.to_bytes(8, "little")}
        launch(program, (1,), parameters, [(address, address + out.nbytes)], 512, 4, reports)
        threads = np.arange(128)
        right = bool((out == 127 - threads + 1000 * (threads < 50)).all())
        found = any("race between warps, " in fault and "shared" in fault for fault in reports.faults)
        if barrier:
            assert right
            assert not reports.faults, reports.faults
        else:
            assert found, "a missing barrier around shared memory is not found"


if __name__ == "__main__":
    shared_memory()
    if "--quick" not in sys.argv:
        faults()
    print("all proved")
