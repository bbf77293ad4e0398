"""Proves the machine itself: kernels with known faults, whose corrected versions pass, and instructions against numpy.

python -m tests.ptx_machine.prove [--target 80|90] [--quick]
"""

import argparse
import sys
import tempfile

from .launcher import Launcher

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--target", type=int, default=80)
PARSER.add_argument("--quick", action="store_true", help="only what needs no compilation")
ASKED = PARSER.parse_args()
LAUNCHER = Launcher(ASKED.target)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

from . import faulty, ptx, values  # noqa: E402
from .grid import ORDERS, launch  # noqa: E402
from .machine import Program  # noqa: E402
from .reports import Reports  # noqa: E402


def run(kernel, grid, arguments, expected=None, fixed=False, **constants):
    """Launch a kernel in all orders; return the faults, and whether the result was right in each of them."""
    faults, right = [], True
    tensors = [] if fixed else [x for x in arguments if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    for order, seed in (("together", 0), ("first", 0), ("last", 0), ("random", 1), ("random", 2)):
        for x, y in zip(tensors, before, strict=True):
            x.copy_(y)
        LAUNCHER.begin(order, seed)
        kernel[grid](*arguments, num_warps=4, **constants)
        faults += LAUNCHER.reports.faults
        right &= expected is None or bool(torch.allclose(expected[0], expected[1], rtol=1e-5, atol=1e-5))
    for x, y in zip(tensors, before, strict=True):
        x.copy_(y)
    return faults, right


FAILED = []


def check(name: str, holds: bool, detail: str = "") -> None:
    print(f"{'proved' if holds else 'FAILED'}: {name}{detail and ': '}{detail}")
    if not holds:
        FAILED.append(name)


def expect(name: str, words: str, kernel, grid, *arguments, constant: tuple[str, bool], **options) -> None:
    """words: of a fault that the kernel must have with this constant, and not with its opposite; none: a wrong result.

    options: as of `run`.
    """
    key, value = constant
    wrong, right = (run(kernel, grid, arguments, **{key: x}, **options) for x in (value, not value))
    found = any(words in fault for fault in wrong[0]) if words else not wrong[1]
    shown = next((fault for fault in wrong[0] if words in fault), "a wrong result") if found else str(wrong)
    check(f"{name} is found", found, shown[:150])
    sound = not right[0] and right[1]
    check(f"without it, {name} is not found", sound, "" if sound else str(right)[:300])


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
    x, y = torch.arange(8.0 * 128), torch.zeros(1)
    options = {"B": 128, "expected": (y, x.sum()), "constant": ("ATOMIC", False)}
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
    for barrier, order in ((b, o) for b in ("", "bar.sync 0;") for o in ORDERS):
        program, reports = Program(ptx.parse(SHARED.replace("BARRIER", barrier))), Reports(kernel="shared")
        out = np.zeros(128, np.int32)
        address = out.ctypes.data
        parameters = {"shared_param_0": address.to_bytes(8, "little")}
        launch(program, (1,), parameters, [(address, address + out.nbytes)], 512, 4, reports, order, 3)
        threads = np.arange(128)
        right = bool((out == 127 - threads + 1000 * (threads < 50)).all())
        found = any("race between warps, " in fault and "shared" in fault for fault in reports.faults)
        if barrier:
            shown = str(reports.faults)[:200] if reports.faults else ""
            check(f"shared memory and divergence, order {order}", right and not reports.faults, shown)
        else:
            check(f"a missing barrier around shared memory is found, order {order}", found)


def instructions() -> None:
    generator = np.random.default_rng(0)
    for kind, k in (("bf16", 16), ("bf16", 8), ("f16", 16), ("f16", 8), ("tf32", 8), ("tf32", 4)):
        warps, halves = 3, 2 if kind != "tf32" else 1
        a, b = generator.normal(size=(warps, 16, k)), generator.normal(size=(warps, k, 8))
        c = generator.normal(size=(warps, 16, 8)).astype(np.float32)
        encoded = [encode(x, kind) for x in (a, b)]
        # the layouts of the PTX manual, written out lane by lane
        a_registers = [np.zeros((warps, 32), np.uint32) for _ in range(16 * k // 32 // halves)]
        b_registers = [np.zeros((warps, 32), np.uint32) for _ in range(8 * k // 32 // halves)]
        c_registers = [np.zeros((warps, 32), np.uint32) for _ in range(4)]
        for lane in range(32):
            group, inner = lane // 4, lane % 4
            for i in range(len(a_registers) * halves):
                if halves == 1:
                    row, column = group + 8 * (i % 2), inner + 4 * (i // 2)
                else:
                    row, column = group + 8 * (i // 2 % 2), inner * 2 + i % 2 + 8 * (i // 4)
                a_registers[i // halves][:, lane] |= encoded[0][:, row, column] << np.uint32(16 * (i % halves))
            for i in range(len(b_registers) * halves):
                row = inner + 4 * i if halves == 1 else inner * 2 + i % 2 + 8 * (i // 2)
                b_registers[i // halves][:, lane] |= encoded[1][:, row, group] << np.uint32(16 * (i % halves))
            for i in range(4):
                c_registers[i][:, lane] = c[:, group + 8 * (i // 2), inner * 2 + i % 2].view(np.uint32)
        d = values.mma(a_registers, b_registers, c_registers, k, kind)
        exact = decode(encoded[0], kind) @ decode(encoded[1], kind) + c
        found = np.zeros_like(exact)
        for lane in range(32):
            for i in range(4):
                found[:, lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = d[i][:, lane].view(np.float32)
        check(f"mma m16n8k{k} {kind}", bool(np.abs(found - exact).max() < 1e-6 * np.abs(exact).max() + 1e-6))
    x = generator.integers(0, 2**32, (4, 32), dtype=np.uint32)
    for mode, b, clamp in (
        ("bfly", 5, 31), ("idx", 7, 31), ("up", 3, 0), ("down", 9, 31), ("bfly", 2, 0x181F), ("down", 3, 0x181F),
        ("up", 3, 0x1800),
    ):  # fmt: skip
        moved, _, _ = values.shuffle(mode, x, b, clamp)
        check(f"shfl.{mode} by {b}, c={clamp:#x}", bool((moved == slow_shuffle(mode, x, b, clamp)).all()))
    numbers = np.concatenate(
        [generator.normal(size=5000), 10.0 ** generator.uniform(-39, 38, 5000), [0, -0.0, np.inf, 1e-45]]
    ).astype(np.float32)
    bf16 = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    check("cvt.rn.bf16.f32", bool((values.to_bf16(numbers) == bf16).all()))
    finite = numbers[np.isfinite(numbers)]
    tf32 = values.to_tf32(finite).view(np.float32)
    check("cvt.rna.tf32.f32", bool((np.abs(tf32 - finite) <= 2.0**-11 * np.abs(finite) + 1e-38).all()))


def encode(x, kind):
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16).astype(np.uint32)
    if kind == "bf16":
        return values.to_bf16(x.astype(np.float32)).astype(np.uint32)
    return x.astype(np.float32).view(np.uint32)


def decode(bits, kind):
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (bits << np.uint32(16)).view(np.float32).astype(np.float64)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def slow_shuffle(mode, x, b, c):
    """As in the PTX manual, lane by lane."""
    result, segment, clamp = x.copy(), c >> 8 & 31, c & 31
    for lane in range(32):
        upper, lower = (lane & segment) | (clamp & ~segment & 31), lane & segment
        if mode == "up":
            j, valid = lane - b, lane - b >= upper
        elif mode == "down":
            j, valid = lane + b, lane + b <= upper
        elif mode == "bfly":
            j, valid = lane ^ b, lane ^ b <= upper
        else:
            j = lower | (b & ~segment & 31)
            valid = j <= upper
        result[:, lane] = x[:, j if valid else lane]
    return result


def compiled_products() -> None:
    for dtype, precision, tolerance in (
        (torch.float32, "tf32x3", 1e-5),
        (torch.float32, "ieee", 1e-6),
        (torch.float32, "tf32", 2e-3),
        (torch.bfloat16, "ieee", 1e-2),
        (torch.float16, "ieee", 2e-3),
    ):
        for m, n, k in ((16, 16, 16), (32, 64, 32), (64, 16, 64)):
            if ASKED.target >= 90 and m == 64 and dtype != torch.float32:
                continue  # wgmma of 16 bits, which the machine does not have
            a, b, c = (torch.randn(*shape).to(dtype) for shape in ((m, k), (k, n), (m, n)))
            c.zero_()
            found, _ = run(faulty.product, (1,), (a, b, c), M=m, N=n, K=k, P=precision, fixed=True)
            exact = a.double() @ b.double()
            error = float((c.double() - exact).abs().max() / exact.abs().max())
            name = f"tl.dot {m}x{n}x{k} {str(dtype)[6:]} {precision}"
            check(name, not found and error < tolerance, f"{error:.1e} {found[:1]}")


def approximations() -> None:
    """Errors in units of the last place, of single instructions, and of Triton's functions made of several."""
    x = torch.cat([torch.linspace(-20, 20, 2001), torch.logspace(-30, 30, 2000)]).float()
    y = torch.zeros(8, len(x))
    LAUNCHER.begin("together", 0)
    faulty.functions[(triton.cdiv(len(x), 128),)](x, y, len(x), B=128, num_warps=4)
    exact = x.double()
    size = exact.abs()
    expected = torch.stack(
        [exact.exp2(), size.log2(), size.rsqrt(), size.sqrt(), 1 / exact, exact.exp(), size.log(), exact.sigmoid()]
    )
    names = ("exp2", "log2", "rsqrt", "sqrt", "reciprocal", "exp", "log", "sigmoid")
    # of exp: what 2 ulp of ex2 and the rounding of its argument x log2(e), up to 30, allow
    limits = (2, 2, 2, 2, 2, 32, 2, 32)
    for name, found, right, limit in zip(names, y, expected, limits, strict=True):
        normal = (right.abs() > 2.0**-126) & (right.abs() < 2.0**127)
        normal &= (size < 22) if name in ("exp", "sigmoid") else True
        unit = 2.0 ** (torch.floor(torch.log2(right.abs())) - 23)
        if name.startswith("log"):
            unit = unit.clamp(min=2.0**-23)  # near 1, PTX promises an absolute error
        ulp = float(((found.double() - right).abs() / unit)[normal].max())
        check(f"{name} within {limit} ulp", ulp <= limit, f"{ulp:.2f}")


def main() -> int:
    shared_memory()
    instructions()
    if not ASKED.quick:
        faults()
        compiled_products()
        approximations()
    print(f"{len(FAILED)} failed" if FAILED else "all proved")
    return int(bool(FAILED))


if __name__ == "__main__":
    sys.exit(main())
