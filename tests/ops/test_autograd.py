"""What autograd does beyond its documented interface, as the operators require it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthlm.ops.autograd import NO_PASS, attached, current_pass, last_input_nodes, node_of


class Noting(torch.autograd.Function):
    """Returns x, and notes the number of each backward pass and the nodes of its last inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tokens: Tensor) -> Tensor:
        ctx.note, ctx.count = "forward", len(tokens)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        SEEN.append((current_pass(), last_input_nodes(ctx, ctx.count) if ctx.count else []))
        return grad, *[None] * ctx.count


SEEN: list[tuple[int, list[Any]]] = []


def leaf() -> Tensor:
    SEEN.clear()
    return torch.ones(3, requires_grad=True)


def test_each_backward_pass_has_a_number_of_its_own():
    x = leaf()
    assert current_pass() == NO_PASS
    y = Noting.apply(Noting.apply(x)).sum()
    for _ in range(2):
        y.backward(retain_graph=True)
    (a, _), (b, _), (c, _), (d, _) = SEEN
    assert a == b != c == d
    assert NO_PASS not in (a, c)
    assert current_pass() == NO_PASS


def test_the_context_of_a_function_is_the_node_of_its_output_and_of_its_views():
    y = Noting.apply(leaf())
    assert node_of(y).note == node_of(y.view(1, 3)).note == "forward"
    assert node_of(y[1:].unsqueeze(0)) is node_of(y)
    assert node_of(leaf()) is None
    z = y * 2
    assert getattr(node_of(z), "note", None) is None
    # a node keeps its attributes after its output is gone
    node_of(y).total = "kept"
    del y
    assert z.grad_fn.next_functions[0][0].total == "kept"


@pytest.mark.parametrize("recompute", [False, True])
def test_the_last_inputs_of_a_function_have_the_nodes_of_the_first_graph_in_the_backward_pass(recompute):
    x = leaf()
    tokens = [Noting.apply(x) for _ in range(2)]
    nodes = [node_of(token) for token in tokens]
    noted = lambda x: Noting.apply(x * 1, *tokens)  # noqa: E731
    (checkpoint(noted, x, use_reentrant=False) if recompute else noted(x)).sum().backward()
    assert SEEN[0][1] == nodes


def test_an_attached_tensor_is_made_once_and_found_by_all_users_of_the_same_tensor():
    x = leaf() * 1
    made: list[Tensor] = []

    def make(x: Tensor) -> Tensor:
        made.append(x.new_empty(0))
        return made[-1]

    assert attached(x, "token", make) is attached(x, "token", make)
    assert attached(x.view(3), "token", make) is not made[0]
    assert attached(x.detach(), "token", make) is not made[0]
    assert len(made) == 3
