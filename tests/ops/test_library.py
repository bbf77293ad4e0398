"""Registered operators: one to PyTorch's modes and compilers, without a derivative, and never defined twice."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from depthlm.ops.library import FUNCTIONS, make_differentiable, register


@register(__name__, "double", torch.empty_like)
def double(x: Tensor) -> Tensor:
    return 2 * x


@register(__name__, "add_all", mutates=["total"])
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


def test_on_fake_and_meta_tensors_nothing_is_computed():
    assert double(torch.ones(3, device="meta")).shape == (3,)
    with FakeTensorMode():
        assert double(torch.ones(3)).shape == (3,)
        add_all([torch.ones(3)], torch.ones(3))


def test_compiled_code_keeps_what_an_operator_writes():
    def compiled(x: Tensor) -> Tensor:
        total = x + 1
        add_all([x, double(x)], total)
        return total

    x = torch.arange(3.0)
    # the operators are opaque, so there is no break in the graph
    assert torch.equal(torch.compile(compiled, backend="aot_eager", fullgraph=True)(x), 4 * x + 1)


def test_an_operator_of_the_same_name_leaves_the_first_one_alone():
    @register(__name__, "double", torch.empty_like)
    def again(x: Tensor) -> Tensor:
        return 3 * x

    x = torch.ones(2)
    assert torch.equal(double(x), 2 * x)
    assert torch.equal(again(x), 3 * x)


def test_only_what_is_made_differentiable_has_gradients():
    @register(__name__, "triple", torch.empty_like)
    def triple(x: Tensor) -> Tensor:
        return 3 * x

    x = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        double(x).sum().backward()
    make_differentiable(triple, lambda ctx, grad: 3 * grad, lambda ctx, inputs, output: None)
    assert torch.equal(torch.autograd.grad(triple(x).sum(), x)[0], torch.full((2,), 3.0))
