"""Backout, a line of the modded-nanogpt recipe: the final read subtracts a share of the hidden state of an early layer.

    hidden = h - lambda X

with X the output of one layer, so that what serves the layers behind it need not be undone by them.

x_0 -> layer 0 -> ... -> layer k -+-> ... -> h -(+)-> hidden
                                  `-> X -> * -lambda ^
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.edges import per_token
from depthlm.model.figures import Figure
from depthlm.model.settings import at_least, check, number
from depthlm.model.shape import Backbone, Size, SublayerSpec


class State(NamedTuple):
    """early: X, once its layer has written it."""

    h: Tensor
    early: Tensor | None = None


class Backout(Connection):
    """A residual connection whose final read has one parameter, lambda.

    layer: the layer, from 0, whose output is X; None: layer floor(2L / 3), the ninth of twelve, as in the recipe.
    start: the initial lambda; with 0, the decoder initially equals vanilla.
    """

    accumulates = "sum"
    identity_start = "start=0.0"

    def __init__(
        self, spec: SublayerSpec, size: Size, backbone: Backbone, layer: int | None = None, start: float = 0.5
    ):
        super().__init__(spec, size, backbone)
        check(at_least(0, layer=layer, optional=True), number(0.0, start=start))
        if layer is not None and layer >= spec.num_layers:
            raise ValueError(f"layer={layer}: the layers of this decoder are 0 to {spec.num_layers - 1}")
        self.layer = 2 * spec.num_layers // 3 if layer is None else layer
        self.start = start
        self.identity_start = "" if start == 0 else self.identity_start
        self.stores = spec.kind == "mlp" and spec.layer == self.layer
        if spec.kind == "final":
            self.weight = nn.Parameter(torch.empty(1))
            self.fp32_parameters = ("weight",)
            self.cost = Cost(2.0 * size.hidden_size, 3.0 * size.hidden_size)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(self.start)

    def open(self, embedding_btd: Tensor) -> State:
        return State(embedding_btd)

    def read(self, state: State, weights: None = None) -> tuple[Inputs, None]:
        if self.spec.kind != "final":
            return (state.h,), None
        assert state.early is not None
        weight: Tensor = self.weight
        if self.edit is not None:
            tokens_1bt = per_token(-self.weight, state.early)
            weight = -self.edited(tokens_1bt, ("source", "batch", "token"), [self.layer + 1])[0, ..., None]
        return ((state.h - weight * state.early).to(state.h.dtype),), None

    def write(self, state: State, output_btd: Tensor, carry: None) -> State:
        h = state.h + output_btd
        return State(h, h if self.stores else state.early)

    def figures(self, state: State) -> list[Figure]:
        final = self.spec.kind == "final"
        return [Figure("weight", self.weight, ("panel",), "the lambda of the final read")] if final else []
