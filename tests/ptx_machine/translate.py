"""PTX blocks as Python functions on numpy arrays: a line or two for each instruction.

A function gets the context X of the warps that run it, and the registers that it reads; it returns those that it wrote.
Only the forms that the kernels have are known: `Unknown` names any other one.
"""

import re

import numpy as np

from . import values
from .accesses import Accesses
from .ptx import REGISTER, Block, Instruction, Kernel, Unknown
from .values import TYPES, UNSIGNED

FORMS = {"add": "({0} + {1})", "sub": "({0} - {1})", "neg": "(-{0})", "not": "~{0}"}
FORMS |= {"and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})"}
APPROXIMATE = {"ex2": "np.exp2({0})", "rsqrt": "(1 / np.sqrt({0}.astype(F64))).astype(F32)"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x")


def python_name(register: str) -> str:
    return "r_" + register[1:]


class Translator(Accesses):
    """Translates the blocks of a kernel. constants: numbers by the name that stands for them in the code."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.constants = kernel, {}
        self.namespace = {name: getattr(values, name) for name in dir(values) if not name.startswith("_")}
        self.namespace |= {dtype.__name__: dtype for dtype in TYPES.values()}

    def function(self, block: Block):
        """Return the registers read and written, and the function."""
        self.lines, self.read, self.written = [], [], []
        for instruction in block.instructions:
            try:
                self.translate(instruction)
            except (Unknown, KeyError, IndexError, AttributeError, ValueError) as error:
                place = f"line {instruction.line}: {instruction.text} ({error!r}) at {instruction.source}"
                raise Unknown(place) from error
        given, written = (", ".join(map(python_name, names)) for names in (self.read, self.written))
        code = "\n    ".join([f"def run(X, {given}):", *self.lines, f"return [{written}]"])
        scope = self.namespace | self.constants | {"np": np}
        exec(compile(code, f"<{self.kernel.name} block {block.index}>", "exec"), scope)
        return self.read, self.written, scope["run"]

    # operands

    def constant(self, number) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = number
        return name

    def register(self, name: str) -> str:
        if name not in self.written and name not in self.read:
            self.read.append(name)
        return python_name(name)

    def operand(self, text: str, kind: str) -> str:
        """Return an expression with the type `kind`."""
        dtype = TYPES[kind]
        if text in SPECIAL:
            return f"X.special['{text}'].astype({dtype.__name__})"
        if REGISTER.fullmatch(text):
            name, width = self.register(text), self.kernel.widths[text]
            if width == 1:
                return name
            wanted = np.dtype(dtype).itemsize * 8
            if wanted != width:
                name = f"{name}.astype({UNSIGNED[wanted].__name__})"
            return name if dtype is UNSIGNED[wanted] else f"{name}.view({dtype.__name__})"
        return self.constant(self.immediate(text, dtype))

    def immediate(self, text: str, dtype):
        if text == "global_smem":  # shared memory begins at 0
            return dtype(0)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            bits = np.uint32(int(text[2:], 16))
            return bits.view(np.float32) if dtype is np.float32 else bits.astype(dtype)
        number = int(text.rstrip("U"), 0)
        if dtype is np.bool_:
            return np.bool_(number != 0)
        if np.issubdtype(dtype, np.floating):
            raise Unknown(f"number {text}")
        bits = np.dtype(dtype).itemsize * 8
        return UNSIGNED[bits](number & (1 << bits) - 1).view(dtype)

    def number(self, text: str) -> int | None:
        """Return the value of an immediate integer, or None."""
        found = re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text)
        return None if found is None else int(text.rstrip("U"), 0)

    def assign(self, instruction: Instruction, target: str, expression: str) -> None:
        """Write a register; expression: an array of its unsigned type. With a guard: only where it holds."""
        if target == "_":
            return
        if instruction.guard:
            expression = f"np.where({self.guard(instruction)}, {expression}, {self.register(target)})"
        if target not in self.written:
            self.written.append(target)
        self.lines.append(f"{python_name(target)} = {expression}")

    def guard(self, instruction: Instruction) -> str:
        if not instruction.guard:
            return "None"
        name, holds = instruction.guard
        return self.register(name) if holds else f"~{self.register(name)}"

    def result(self, instruction: Instruction, expression: str, kind: str) -> None:
        """Write the first operand from an expression of the type `kind`, whose width may be smaller."""
        width = self.kernel.widths[instruction.operands[0]]
        if width > 1 and width != np.dtype(TYPES[kind]).itemsize * 8:
            expression = f"({expression}).astype({'S' if kind[0] == 's' else 'U'}{width}).view(U{width})"
        elif width > 1 and TYPES[kind] is not UNSIGNED[width]:
            expression = f"({expression}).view(U{width})"
        self.assign(instruction, instruction.operands[0], expression)

    # instructions

    def translate(self, i: Instruction) -> None:
        if method := getattr(self, f"do_{i.name}", None):
            return method(i)
        if i.name in FORMS:
            return self.calculate(i, FORMS[i.name])
        if i.name in APPROXIMATE and i.type == "f32":
            given = self.operand(i.operands[1], "f32")
            text = APPROXIMATE[i.name].format(f"flush({given})" if "ftz" in i.marks else given)
            return self.result(i, self.flushed(i, text), "f32")
        raise Unknown("no such instruction")

    def flushed(self, i: Instruction, text: str) -> str:
        return f"flush({text})" if "ftz" in i.marks else text

    def calculate(self, i: Instruction, form: str) -> None:
        self.result(i, self.flushed(i, form.format(*(self.operand(x, i.type) for x in i.operands[1:]))), i.type)

    def do_fma(self, i):
        """Of bf16 and of pairs of them: computed exactly and rounded to fp32, and then to bf16."""
        if i.type == "f32":
            return self.calculate(i, "fma({0}, {1}, {2})")
        pairs = {"bf16": False, "bf16x2": True}[i.type]
        given, parts = [self.operand(x, "b32" if pairs else "b16") for x in i.operands[1:]], []
        for shift in (0, 16)[: 1 + pairs]:
            factors = (f"from_bf16(({x} >> {shift}).astype(U16))" for x in given)
            parts.append(f"to_bf16(fma({', '.join(factors)}))")
        self.assign(i, i.operands[0], f"pack({', '.join(parts)})" if pairs else parts[0])

    def do_mul(self, i):
        if "wide" in i.marks:
            return self.widen(i, "({0} * {1})")
        self.calculate(i, "multiply_high({0}, {1})" if "hi" in i.marks else "({0} * {1})")

    def do_mad(self, i):
        if "wide" in i.marks:
            return self.widen(i, "({0} * {1} + {2})")
        if "lo" not in i.marks:
            raise Unknown("mad")
        self.calculate(i, "({0} * {1} + {2})")

    def widen(self, i: Instruction, form: str) -> None:
        """Compute with two factors, and maybe a sum, of which the sum has twice the width."""
        wide = i.type[0] + str(2 * int(i.type[1:]))
        factors = [f"{self.operand(x, i.type)}.astype({TYPES[wide].__name__})" for x in i.operands[1:3]]
        self.result(i, form.format(*factors, *(self.operand(x, wide) for x in i.operands[3:])), wide)

    def do_min(self, i):
        if "NaN" in i.marks:
            raise Unknown("min or max with NaN")
        self.calculate(i, f"np.f{i.name}({{0}}, {{1}})")

    do_max = do_min

    def do_div(self, i):
        self.calculate(i, "({0} / {1})" if i.type[0] == "f" else "divide({0}, {1})")

    def do_shl(self, i):
        self.result(i, f"{i.name}({self.operand(i.operands[1], i.type)}, {self.operand(i.operands[2], 'u32')})", i.type)

    do_shr = do_shl

    def do_bfe(self, i):
        start, length = (self.number(x) for x in i.operands[2:])
        if start is None or length is None:
            raise Unknown("bfe of registers")
        self.result(i, f"extract({self.operand(i.operands[1], i.type)}, {start}, {length})", i.type)

    def do_prmt(self, i):
        if i.marks != ("b32",):
            raise Unknown("prmt with a mode")
        a, b, selector = (self.operand(x, "b32") for x in i.operands[1:4])
        self.result(i, f"permute({a}, {b}, {selector})", "b32")

    def do_selp(self, i):
        a, b = (self.operand(x, i.type) for x in i.operands[1:3])
        self.result(i, f"np.where({self.operand(i.operands[3], 'pred')}, {a}, {b})", i.type)

    def do_setp(self, i):
        if len(i.marks) != 2 or "|" in i.operands[0] or i.type == "bf16" or i.marks == ("ne", "f32"):
            raise Unknown("this comparison")
        a, b = (self.operand(x, i.type) for x in i.operands[1:3])
        text = f"~(np.isnan({a}) | np.isnan({b}))" if i.marks[0] == "num" else f"({a} {COMPARE[i.marks[0]]} {b})"
        self.assign(i, i.operands[0], text)

    def do_mov(self, i):
        target, origin = i.operands
        if isinstance(target, tuple):
            width = int(i.type[1:]) // len(target)
            self.lines.append(f"whole = {self.operand(origin, i.type)}")
            for k, name in enumerate(target):
                self.assign(i, name, f"(whole >> {k * width}).astype(U{width})")
        elif isinstance(origin, tuple):
            whole, width = i.type[1:], int(i.type[1:]) // len(origin)
            parts = [f"({self.operand(x, f'b{width}')}.astype(U{whole}) << {k * width})" for k, x in enumerate(origin)]
            self.result(i, " | ".join(parts), i.type)
        else:
            constant = not REGISTER.fullmatch(origin) and origin not in SPECIAL
            text = self.operand(origin, i.type)
            self.result(i, f"X.full({text})" if constant else text, i.type)

    def do_cvt(self, i):
        *modes, to, origin = i.marks
        mode = modes[0] if modes else ""
        if mode not in ("", "rn", "rna") or len(modes) > 1:
            raise Unknown("rounding of cvt")
        if to in ("bf16x2", "f16x2"):
            high, low = (self.operand(x, "f32") for x in i.operands[1:])
            one = "to_bf16({})" if to == "bf16x2" else "{}.astype(F16).view(U16)"
            return self.assign(i, i.operands[0], f"pack({one.format(low)}, {one.format(high)})")
        given = self.operand(i.operands[1], "b16" if origin == "bf16" else origin)
        if origin == "bf16":
            given = f"from_bf16({given})"
        if to in ("bf16", "tf32"):
            return self.assign(i, i.operands[0], f"to_{to}({given})")
        if to[0] != "f" and origin[0] in "fb":
            raise Unknown("cvt to an integer")
        self.result(i, f"{given}.astype({TYPES[to].__name__})", to)

    def do_shfl(self, i):
        target, origin, b, c, _ = i.operands
        if "|" in target or c != "31":
            raise Unknown("shfl with a predicate, or within a part of a warp")
        origin, by = self.operand(origin, "b32"), self.operand(b, "s32")
        self.lines.append(f"moved, lane = shuffle('{i.marks[1]}', {origin}, {by})")
        self.lines.append(f"X.shuffled(lane, {self.guard(i)}, {self.constant(i)})")
        self.assign(i, target, "moved")

    def do_mma(self, i):
        shape, kinds = i.marks[2], i.marks[-4:]
        if not re.fullmatch(r"m16n8k\d+", shape) or kinds[0] != "f32" or kinds[3] != "f32" or kinds[1] != kinds[2]:
            raise Unknown("this form of mma")
        d, *given = i.operands
        registers = ["[" + ", ".join(self.operand(x, "b32") for x in part) + "]" for part in given]
        self.lines.append(f"sums = mma({', '.join(registers)}, {int(shape[6:])}, '{kinds[1]}')")
        self.lines.append(f"X.whole_warps({self.constant(i)})")
        for k, name in enumerate(d):
            self.assign(i, name, f"sums[{k}]")
