"""Instructions that access memory, as Python expressions: see `translate`."""

import re

import numpy as np

from .ptx import Instruction, Unknown
from .values import TYPES

SPACES = ("global", "shared", "param", "local")


class Accesses:
    """The methods of a translator for instructions that access memory."""

    def place(self, i: Instruction) -> str:
        return self.constant(i)

    def address(self, text: str, space: str) -> tuple[str, int]:
        """Return an expression of the address, and a number to be added to it."""
        inner = text[1:-1].replace(" ", "")
        base, sign, offset = re.fullmatch(r"([%\w$]+)(?:([+-]+)(\d+))?", inner).groups()
        number = 0 if offset is None else int(offset) * (-1 if "-" in sign else 1)
        narrow = space == "shared" and self.kernel.widths.get(base, 32) == 32
        return self.operand(base, "u32" if narrow else "u64"), number

    def vector(self, operand) -> tuple:
        return operand if isinstance(operand, tuple) else (operand,)

    def do_ld(self, i):
        space = next((m for m in i.marks if m.split("::")[0] in SPACES), "generic")
        kind = i.type
        if space == "param":
            name, offset = re.fullmatch(r"\[\s*(\w+)(?:\s*\+\s*(\d+))?\s*\]", i.operands[1]).groups()
            return self.result(i, f"X.full(X.parameter('{name}', {offset or 0}, {TYPES[kind].__name__}))", kind)
        if space not in ("global", "shared"):
            raise Unknown("space")
        targets, (base, offset) = self.vector(i.operands[0]), self.address(i.operands[1], space)
        width = np.dtype(TYPES[kind]).itemsize
        arguments = f"'{space}', {base}, {offset}, {self.guard(i)}, {width}, {len(targets)}, {self.place(i)}"
        self.lines.append(f"got = X.load({arguments})")
        for k, name in enumerate(targets):
            if name == "_":
                continue
            own, expression = self.kernel.widths[name], f"got[{k}]"
            if own != 8 * width and kind.startswith("s"):
                expression = f"{expression}.view(S{8 * width}).astype(S{own}).view(U{own})"
            elif own != 8 * width:
                expression = f"{expression}.astype(U{own})"
            self.assign(i, name, expression)

    def do_st(self, i):
        space = next((m for m in i.marks if m.split("::")[0] in SPACES), "generic")
        if space not in ("global", "shared"):
            raise Unknown("space")
        (base, offset), kind = self.address(i.operands[0], space), i.type
        width = np.dtype(TYPES[kind]).itemsize
        given = ", ".join(self.operand(x, f"b{8 * width}") for x in self.vector(i.operands[1]))
        arguments = f"'{space}', {base}, {offset}, {self.guard(i)}, {width}, [{given}], {self.place(i)}"
        self.lines.append(f"X.store({arguments})")

    def do_atom(self, i):
        """Also `red`, which returns nothing."""
        if "global" not in i.marks or i.type not in ("f32", "s32", "u32", "b32", "s64", "u64"):
            raise Unknown("this atomic operation")
        returns = i.name == "atom"
        operation = next(m for m in i.marks if m in ("add", "max", "min", "exch"))
        (base, offset), kind = self.address(i.operands[returns], "global"), i.type
        given = self.operand(i.operands[1 + returns], kind)
        self.lines.append(f"got = X.atomic({base}, {offset}, {self.guard(i)}, '{operation}', {given}, {self.place(i)})")
        if returns:
            self.result(i, "got", kind)

    do_red = do_atom

    def do_cp(self, i):
        if i.marks[:2] == ("async", "commit_group"):
            self.lines.append("X.commit_copies()")
        elif i.marks[:2] in (("async", "wait_group"), ("async", "wait_all")):
            self.lines.append(f"X.wait_copies({self.number(i.operands[0]) if i.operands else 0}, {self.place(i)})")
        elif i.marks[0] == "async" and "bulk" not in i.marks:
            to, to_offset = self.address(i.operands[0], "shared")
            origin, offset = self.address(i.operands[1], "global")
            size = self.number(i.operands[2])
            used = self.operand(i.operands[3], "u32") if len(i.operands) > 3 else "None"
            arguments = f"{to}, {to_offset}, {origin}, {offset}, {self.guard(i)}, {size}, {used}"
            self.lines.append(f"X.copy_async({arguments}, {self.place(i)})")
        else:
            raise Unknown("this copy")

    def do_ldmatrix(self, i):
        targets, (base, offset) = self.vector(i.operands[0]), self.address(i.operands[1], "shared")
        if "m8n8" not in i.marks or i.type != "b16":
            raise Unknown("this ldmatrix")
        self.lines.append(
            f"got = X.load_matrices({base}, {offset}, {len(targets)}, {'trans' in i.marks}, {self.place(i)})"
        )
        for k, name in enumerate(targets):
            self.assign(i, name, f"got[{k}]")

    def do_stmatrix(self, i):
        (base, offset), given = self.address(i.operands[0], "shared"), self.vector(i.operands[1])
        registers = ", ".join(self.operand(x, "b32") for x in given)
        self.lines.append(f"X.store_matrices({base}, {offset}, [{registers}], {'trans' in i.marks}, {self.place(i)})")

    def do_bar(self, i):
        self.lines.append("X.sync_warps()")

    def do_griddepcontrol(self, i):
        """Nothing to wait for: launches run one after the other."""

    do_fence = do_membar = do_griddepcontrol
