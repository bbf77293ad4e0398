"""A parser of the PTX that Triton makes: one entry function, its parameters, registers and basic blocks."""

import re
from dataclasses import dataclass, field

# of what kernels declare
WIDTHS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}
ENDS = ("bra", "ret", "bar")
REGISTER = re.compile(r"%[a-zA-Z_]+\d+\b")


class Unknown(NotImplementedError):
    """An instruction that the machine does not have."""


@dataclass
class Instruction:
    """Such as `@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+4];`: guard (%p1, False), name ld, marks global v2 b32.

    operands: texts; a vector is a tuple of texts. line: in the PTX. source: the place in the Python source.
    """

    text: str
    line: int
    source: str
    guard: tuple[str, bool] | None
    name: str
    marks: tuple[str, ...]
    operands: list

    @property
    def type(self) -> str:
        return self.marks[-1]


@dataclass
class Block:
    """Instructions that run one after the other. last: what ends the block, if it does not run into the next one."""

    index: int
    instructions: list[Instruction] = field(default_factory=list)
    last: Instruction | None = None


@dataclass
class Kernel:
    """parameters: their names and types, in order. widths: bits of each register. labels: the block of each label."""

    name: str
    parameters: list[tuple[str, str]]
    widths: dict[str, int]
    blocks: list[Block]
    labels: dict[str, int]


def parse(text: str) -> Kernel:
    """Raises: ValueError for what is not understood."""
    name = re.search(r"\.entry\s+(\w+)", text)[1]
    header, body = re.search(r"\.entry\s+\w+\s*(.*?)^\{(.*?)^\}", text, re.S | re.M).groups()
    first_line = text[: text.index(body)].count("\n") + 1
    parameters = [(m[2], m[1]) for m in re.finditer(r"\.param\s+\.(\w+)[^,()]*?\b(\w+)\s*(?:,|\n|\))", header)]
    kernel = Kernel(name, parameters, {}, [Block(0)], {})
    source, pending = "?", ""
    for number, line in enumerate(body.split("\n"), first_line):
        code, _, comment = line.partition("//")
        if code.strip().startswith(".loc"):
            source = comment.strip() or code.strip()
            continue
        code = pending + " " + code if pending else code
        pending = ""
        for statement in re.split(r"(?<=;)|(?<=:)(?=\s|$)", code):
            statement = statement.strip()
            while statement and (statement in "{}" or re.match(r"\{\s*\.reg|\{\s*$|\}\s*$", statement)):
                statement = statement[1:].strip()  # a scope of inline assembler
            if not statement or statement.startswith((".pragma", ".section")):
                continue
            if statement.startswith(("$L__tmp", "$L__func", "$L__debug")):
                continue  # of debug information
            if statement.endswith(":"):
                if kernel.blocks[-1].instructions or kernel.blocks[-1].last:
                    kernel.blocks.append(Block(len(kernel.blocks)))
                kernel.labels[statement[:-1]] = kernel.blocks[-1].index
            elif not statement.endswith(";"):
                pending = statement
            elif statement.startswith(".reg"):
                declare(kernel, statement)
            else:
                add(kernel, instruction(statement[:-1], number, source))
    return kernel


def declare(kernel: Kernel, statement: str) -> None:
    kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*);", statement).groups()
    for name in names.split(","):
        counted = re.match(r"\s*%?([\w$]+)<(\d+)>", name)
        width = WIDTHS[kind]
        if counted:
            kernel.widths |= {f"%{counted[1]}{i}": width for i in range(int(counted[2]))}
        else:
            kernel.widths[name.strip()] = width


def add(kernel: Kernel, made: Instruction) -> None:
    block = kernel.blocks[-1]
    if made.name in ENDS and "warp" not in made.marks:
        block.last = made
        kernel.blocks.append(Block(block.index + 1))
    else:
        block.instructions.append(made)


def instruction(text: str, line: int, source: str) -> Instruction:
    guard = re.match(r"@(!?)(%?[\w$]+)\s+", text)
    rest = text[guard.end() :] if guard else text
    opcode, _, operands = rest.strip().partition(" ")
    if "\t" in opcode:
        opcode, _, operands = rest.strip().partition("\t")
    name, *marks = opcode.split(".")
    found = [
        tuple(part.strip() for part in m[1:-1].split(",")) if m.startswith("{") else m.strip()
        for m in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", operands)
        if m.strip(" ,\t")
    ]
    return Instruction(text.strip(), line, source, guard and (guard[2], not guard[1]), name, tuple(marks), found)
