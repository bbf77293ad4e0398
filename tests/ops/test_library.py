"""Registered operators: one to PyTorch's modes and compilers, without a derivative, and never defined twice."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from depthlm.ops.library import FUNCTIONS, register


@register("double", torch.empty_like)
def double(x: Tensor) -> Tensor:
    return 2 * x


@register("add_all", mutates=["total"])
def add_all(xs: list[Tensor], total: Tensor) -> None:
    for x in xs:
        total += x


def test_a_mode_sees_one_operator_and_may_run_its_function():
    x, names = torch.ones(2), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._schema.name)
            return FUNCTIONS[names[-1]](*args)

    with Mode():
        y = double(x)
    assert torch.equal(y, 2 * x)
    assert names == [double._schema.name]
    assert double(torch.ones(3, device="meta")).shape == (3,)


def test_compiled_code_keeps_what_an_operator_writes():
    def compiled(x: Tensor) -> Tensor:
        total = x + 1
        add_all([x, double(x)], total)
        return total

    x = torch.arange(3.0)
    # the operators are opaque, so there is no break in the graph
    assert torch.equal(torch.compile(compiled, backend="aot_eager", fullgraph=True)(x), 4 * x + 1)
