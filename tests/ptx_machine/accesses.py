"""Instructions that access memory, as Python expressions: see `translate`."""

import re

import numpy as np

from .ptx import Instruction, Unknown
from .values import TYPES

SPACES = ("global", "shared", "param")


def space_of(i: Instruction) -> str:
    space = next((mark for mark in i.marks if mark in SPACES), None)
    if space is None:
        raise Unknown("this memory")
    return space


def vector(operand) -> tuple:
    return operand if isinstance(operand, tuple) else (operand,)


class Accesses:
    """The methods of a translator for instructions that access memory."""

    def address(self, text: str, space: str) -> str:
        """Return an expression of the address, and of a number to be added to it."""
        base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", text).groups()
        narrow = space == "shared" and self.kernel.widths.get(base, 32) == 32
        return f"{self.operand(base, 'u32' if narrow else 'u64')}, {offset or 0}"

    def do_ld(self, i):
        space, kind = space_of(i), i.type
        if space == "param":
            name, offset = re.fullmatch(r"\[\s*(\w+)(?:\s*\+\s*(\d+))?\s*\]", i.operands[1]).groups()
            return self.result(i, f"X.full(X.parameter('{name}', {offset or 0}, {TYPES[kind].__name__}))", kind)
        targets, width = vector(i.operands[0]), np.dtype(TYPES[kind]).itemsize
        arguments = f"'{space}', {self.address(i.operands[1], space)}, {self.guard(i)}, {width}, {len(targets)}"
        self.lines.append(f"got = X.load({arguments}, {self.constant(i)})")
        for k, name in enumerate(targets):
            if name != "_":
                self.assign(i, name, f"got[{k}].astype(U{self.kernel.widths[name]})")

    def do_st(self, i):
        space, width = space_of(i), np.dtype(TYPES[i.type]).itemsize
        given = ", ".join(self.operand(x, f"b{8 * width}") for x in vector(i.operands[1]))
        arguments = f"'{space}', {self.address(i.operands[0], space)}, {self.guard(i)}, {width}, [{given}]"
        self.lines.append(f"X.store({arguments}, {self.constant(i)})")

    def do_cp(self, i):
        if i.marks == ("async", "commit_group"):
            self.lines.append("X.commit_copies()")
        elif i.marks == ("async", "wait_group"):
            self.lines.append(f"X.wait_copies({self.number(i.operands[0])}, {self.constant(i)})")
        elif i.marks[0] == "async" and "bulk" not in i.marks:
            to, origin = self.address(i.operands[0], "shared"), self.address(i.operands[1], "global")
            size = self.number(i.operands[2])
            used = self.operand(i.operands[3], "u32") if len(i.operands) > 3 else "None"
            self.lines.append(f"X.copy_async({to}, {origin}, {self.guard(i)}, {size}, {used}, {self.constant(i)})")
        else:
            raise Unknown("this copy")

    def do_ldmatrix(self, i):
        if "m8n8" not in i.marks or i.type != "b16":
            raise Unknown("this ldmatrix")
        targets, address = vector(i.operands[0]), self.address(i.operands[1], "shared")
        arguments = f"{address}, {len(targets)}, {'trans' in i.marks}, {self.constant(i)}"
        self.lines.append(f"got = X.load_matrices({arguments})")
        for k, name in enumerate(targets):
            self.assign(i, name, f"got[{k}]")

    def do_bar(self, i):
        self.lines.append("X.sync_warps()")
