"""PTX blocks as Python functions on numpy arrays: a line or two for each instruction.

A function gets the context X of the warps that run it, and the registers that it reads; it returns those that it wrote.
"""

import re

import numpy as np

from . import values
from .accesses import Accesses
from .ptx import REGISTER, Block, Instruction, Kernel, Unknown
from .values import TYPES, UNSIGNED

INFIX = {"and": "&", "or": "|", "xor": "^"}
FORMS = {"add": "({0} + {1})", "sub": "({0} - {1})", "neg": "(-{0})", "abs": "np.abs({0})", "not": "~{0}"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
APPROXIMATE = {"ex2": "np.exp2({0})", "lg2": "np.log2({0})", "rcp": "(F32(1) / {0})", "sqrt": "np.sqrt({0})"}
APPROXIMATE |= {"rsqrt": "(1 / np.sqrt({0}.astype(F64))).astype(F32)", "sin": "np.sin({0})", "cos": "np.cos({0})"}
APPROXIMATE |= {"tanh": "np.tanh({0})"}
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x", "%laneid")


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
                raise Unknown(
                    f"line {instruction.line}: {instruction.text} ({error!r}) at {instruction.source}"
                ) from error
        given = ", ".join(map(python_name, self.read))
        code = "\n    ".join(
            [f"def run(X, {given}):", *self.lines, f"return [{', '.join(map(python_name, self.written))}]"]
        )
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
            return f"X.special['{text}']" + ("" if dtype is values.U32 else f".astype({dtype.__name__})")
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
        if text in self.kernel.shared:
            return dtype(self.kernel.shared[text])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            bits = (np.uint32 if text[1] in "fF" else np.uint64)(int(text[2:], 16))
            if not np.issubdtype(dtype, np.floating):
                return bits.astype(dtype)
            return bits.view(np.float32 if text[1] in "fF" else np.float64).astype(dtype)
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
        name = python_name(target)
        if instruction.guard:
            expression = f"np.where({self.guard(instruction)}, {expression}, {self.register(target)})"
        if target not in self.written:
            self.written.append(target)
        self.lines.append(f"{name} = {expression}")

    def guard(self, instruction: Instruction) -> str:
        if not instruction.guard:
            return "None"
        name, holds = instruction.guard
        return self.register(name) if holds else f"~{self.register(name)}"

    def result(self, instruction: Instruction, expression: str, kind: str) -> None:
        """Write the first operand from an expression of the type `kind`, whose width may be smaller."""
        target = instruction.operands[0]
        width = 0 if target == "_" else self.kernel.widths[target]
        unsigned = UNSIGNED[width] if width else values.U32
        own = np.dtype(TYPES[kind]).itemsize * 8
        if width > 1 and own != width:
            signed = kind.startswith("s")
            expression = f"({expression}).astype({'S' if signed else 'U'}{width})" + (
                f".view(U{width})" if signed else ""
            )
        elif width > 1 and TYPES[kind] is not unsigned:
            expression = f"({expression}).view({unsigned.__name__})"
        self.assign(instruction, target, expression)

    # instructions

    def translate(self, i: Instruction) -> None:
        method = getattr(self, f"do_{i.name}", None)
        if method:
            return method(i)
        kind = i.type if i.marks else ""
        if i.name in INFIX:
            return self.binary(i, f"({{0}} {INFIX[i.name]} {{1}})")
        if i.name in FORMS:
            return self.arithmetic(i, FORMS[i.name])
        if i.name in APPROXIMATE and kind == "f32":
            given = self.operand(i.operands[1], kind)
            text = APPROXIMATE[i.name].format(f"flush({given})" if "ftz" in i.marks else given)
            return self.result(i, self.flushed(i, text), kind)
        raise Unknown("no such instruction")

    def flushed(self, i: Instruction, text: str) -> str:
        return f"flush({text})" if "ftz" in i.marks else text

    def binary(self, i: Instruction, form: str) -> None:
        self.result(i, self.flushed(i, form.format(*(self.operand(x, i.type) for x in i.operands[1:]))), i.type)

    def arithmetic(self, i: Instruction, form: str, wide_form: str | None = None) -> None:
        """Translate an instruction; its f16, bf16 and packed forms are computed in fp32 and rounded once.

        wide_form: for other types.
        """
        kind = i.type
        if kind not in ("f16", "bf16", "f16x2", "bf16x2"):
            return self.binary(i, wide_form or form)
        lanes = 2 if kind.endswith("x2") else 1
        given = [self.operand(x, "b32" if lanes == 2 else "b16") for x in i.operands[1:]]
        parts = []
        for lane in range(lanes):
            halves = [f"({x} >> U32({16 * lane})).astype(U16)" if lanes == 2 else x for x in given]
            exact = [f"from_bf16({x})" if kind.startswith("b") else f"{x}.view(F16).astype(F32)" for x in halves]
            total = form.format(*(f"{x}.astype(F64)" for x in exact))
            parts.append(
                f"to_bf16(({total}).astype(F32))" if kind.startswith("b") else f"({total}).astype(F16).view(U16)"
            )
        self.assign(i, i.operands[0], f"pack({', '.join(parts)})" if lanes == 2 else parts[0])

    def do_fma(self, i):
        kind = {"f32": "F32", "f64": "F64"}.get(i.type)
        self.arithmetic(i, "({0} * {1} + {2})", f"fma({{0}}, {{1}}, {{2}}, {kind})")

    def do_mul(self, i):
        if "wide" in i.marks:
            kind = i.type
            wide = kind[0] + str(2 * int(kind[1:]))
            form = "({{0}}.astype({0}) * {{1}}.astype({0}))".format(TYPES[wide].__name__)
            return self.result(i, form.format(*(self.operand(x, kind) for x in i.operands[1:])), wide)
        self.arithmetic(i, "({0} * {1})", "multiply_high({0}, {1})" if "hi" in i.marks else None)

    def do_mad(self, i):
        kind = i.type
        a, b = (self.operand(x, kind) for x in i.operands[1:3])
        if "wide" in i.marks:
            wide = kind[0] + str(2 * int(kind[1:]))
            name = TYPES[wide].__name__
            return self.result(
                i, f"({a}.astype({name}) * {b}.astype({name}) + {self.operand(i.operands[3], wide)})", wide
            )
        if "lo" not in i.marks:
            raise Unknown("mad")
        self.result(i, f"({a} * {b} + {self.operand(i.operands[3], kind)})", kind)

    def do_min(self, i, word="min"):
        if i.type[0] in "us":
            return self.binary(i, f"np.{word}imum({{0}}, {{1}})")
        form = f"np.{word}imum({{0}}, {{1}})" if "NaN" in i.marks else f"np.f{word}({{0}}, {{1}})"
        self.arithmetic(i, form)

    def do_max(self, i):
        self.do_min(i, "max")

    def do_div(self, i):
        self.binary(i, "({0} / {1})" if i.type[0] == "f" else "divide({0}, {1})")

    def do_rem(self, i):
        a, b = (self.operand(x, i.type) for x in i.operands[1:])
        self.result(i, f"({a} - divide({a}, {b}) * {b})", i.type)

    def do_shl(self, i, function="shift_left"):
        a, count = self.operand(i.operands[1], i.type), self.number(i.operands[2])
        sign = "<<" if function == "shift_left" else ">>"
        if count is not None and count < int(i.type[1:]):
            return self.result(i, f"({a} {sign} {TYPES[i.type].__name__}({count}))", i.type)
        self.result(i, f"{function}({a}, {self.operand(i.operands[2], 'u32')})", i.type)

    def do_shr(self, i):
        self.do_shl(i, "shift_right")

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
        kind, comparison = i.type, i.marks[0]
        a, b = (self.operand(x, "b16" if kind == "bf16" else kind) for x in i.operands[1:3])
        if kind == "bf16":
            a, b = f"from_bf16({a})", f"from_bf16({b})"
        if comparison in ("num", "nan"):
            text = f"(np.isnan({a}) | np.isnan({b}))"
            text = f"~{text}" if comparison == "num" else text
        elif comparison in COMPARE:
            text = f"({a} {COMPARE[comparison]} {b})"
            if comparison == "ne" and "f" in kind:
                text = f"({text} & ~np.isnan({a}) & ~np.isnan({b}))"
        else:  # unordered: also where one is not a number
            text = f"(({a} {COMPARE[comparison[:-1]]} {b}) | np.isnan({a}) | np.isnan({b}))"
        for mark in i.marks[1:-1]:
            if mark in ("and", "or", "xor"):
                negated = i.operands[3].startswith("!")
                third = self.operand(i.operands[3].lstrip("!"), "pred")
                text = f"({text} {INFIX[mark]} {'~' if negated else ''}{third})"
        if "|" in i.operands[0]:
            raise Unknown("two predicates")
        self.assign(i, i.operands[0], text)

    def do_mov(self, i):
        target, origin = i.operands
        if isinstance(target, tuple):
            width = int(i.type[1:]) // len(target)
            given = self.operand(origin, f"b{int(i.type[1:])}")
            self.lines.append(f"whole = {given}")
            for k, name in enumerate(target):
                self.assign(i, name, f"(whole >> {UNSIGNED[int(i.type[1:])].__name__}({k * width})).astype(U{width})")
        elif isinstance(origin, tuple):
            whole, width = i.type[1:], int(i.type[1:]) // len(origin)
            parts = [
                f"({self.operand(x, f'b{width}')}.astype(U{whole}) << U{whole}({k * width}))"
                for k, x in enumerate(origin)
            ]
            self.result(i, "(" + " | ".join(parts) + ")", i.type)
        else:
            constant = not REGISTER.fullmatch(origin) and origin not in SPECIAL
            self.result(
                i, f"X.full({self.operand(origin, i.type)})" if constant else self.operand(origin, i.type), i.type
            )

    def do_cvt(self, i):
        modes = [m for m in i.marks if m in ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")]
        to, origin = [m for m in i.marks if m in (*TYPES, "bf16", "bf16x2", "f16x2")][-2:]
        mode = modes[0] if modes else ""
        if "sat" in i.marks or "relu" in i.marks or mode in ("rm", "rp"):
            raise Unknown("rounding of cvt")
        if to in ("bf16x2", "f16x2"):
            high, low = (self.operand(x, "f32") for x in i.operands[1:])
            one = f"to_bf16({{}}, '{mode}')" if to == "bf16x2" else "{}.astype(F16).view(U16)"
            return self.assign(i, i.operands[0], f"pack({one.format(low)}, {one.format(high)})")
        given = self.operand(i.operands[1], "b16" if origin == "bf16" else origin)
        if origin == "bf16":
            given, origin = f"from_bf16({given})", "f32"
        if to == "bf16":
            return self.assign(i, i.operands[0], f"to_bf16({given}, '{mode}')")
        if to == "tf32":
            return self.assign(i, i.operands[0], f"to_tf32({given})")
        if to[0] == "f" and origin[0] == "f" and mode in ("rni", "rzi", "rmi", "rpi"):
            word = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[mode]
            return self.result(i, f"np.{word}({given}).astype({TYPES[to].__name__})", to)
        if to[0] != "f" and origin[0] == "f":
            return self.result(i, f"to_integer({given}, {TYPES[to].__name__}, '{mode}')", to)
        if mode == "rz":
            raise Unknown("rounding of cvt")
        self.result(i, f"{given}.astype({TYPES[to].__name__})", to)

    def do_shfl(self, i):
        target, origin, b, c, _ = i.operands
        mode = i.marks[1]
        target, _, predicate = target.partition("|")
        given = self.operand(origin, "b32")
        arguments = [str(self.number(x)) if self.number(x) is not None else self.operand(x, "s32") for x in (b, c)]
        self.lines.append(f"moved, lane, valid = shuffle('{mode}', {given}, {', '.join(arguments)})")
        self.lines.append(f"X.shuffled(lane, {self.guard(i)}, {self.place(i)})")
        self.assign(i, target, "moved")
        if predicate:
            self.assign(i, predicate, "valid")

    def do_mma(self, i):
        shape, kinds = i.marks[2], i.marks[-4:]
        d, a, b, c = i.operands
        if not re.fullmatch(r"m16n8k\d+", shape) or kinds[0] != "f32" or kinds[3] != "f32" or kinds[1] != kinds[2]:
            raise Unknown("this form of mma")
        registers = ["[" + ", ".join(self.operand(x, "b32") for x in part) + "]" for part in (a, b, c)]
        self.lines.append(f"sums = mma({', '.join(registers)}, {int(shape[6:])}, '{kinds[1]}')")
        self.lines.append(f"X.whole_warps({self.place(i)})")
        for k, name in enumerate(d):
            self.assign(i, name, f"sums[{k}]")

    def do_wgmma(self, i):
        """With its first factor in registers; complete at once, so there is nothing to wait for."""
        if i.marks[0] != "mma_async":
            return
        found = re.fullmatch(r"m64n(\d+)k8", i.marks[3])
        if not found or i.marks[4:] != ("f32", "tf32", "tf32") or i.operands[4:] != ["1", "1"]:
            raise Unknown("this form of wgmma")
        d, a, b, kept = i.operands[:4]
        kept = self.operand(kept, "pred") if kept.startswith("%") else str(kept != "0")
        sums = "[" + ", ".join(self.operand(x, "b32") for x in d) + "]"
        if isinstance(a, tuple):
            a = f"matrix([{', '.join(self.operand(x, 'b32') for x in a)}], 16, 8, 'tf32')"
        else:
            a = f"X.described({self.operand(a, 'b64')}, 16, {self.place(i)}, True)"
        b = f"X.described({self.operand(b, 'b64')}, {int(found[1])}, {self.place(i)})"
        self.lines.append(f"sums = wgmma({sums}, {a}, {b}, {kept})")
        for k, name in enumerate(d):
            self.assign(i, name, f"sums[{k}]")
