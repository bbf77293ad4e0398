"""Embedding skip, a line of the modded-nanogpt recipe: the input of every layer is a weighted sum with the embedding.

    h <- a_l h + b_l x_0,  before layer l

x_0 -+-------------------------------------------------> * b_l
     `-> h -> * a_l -(+ b_l x_0)-> attention -(+)-> MLP -(+)-> h
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.edges import per_token
from depthlm.model.figures import Figure
from depthlm.model.shape import Backbone, Size, SublayerSpec


class State(NamedTuple):
    h: Tensor
    embedding: Tensor


class EmbeddingSkip(Connection):
    """A residual connection with two parameters per layer, initially a = 1 and b = 0, as vanilla."""

    colour = "#A6761D"
    identity_start = ""
    accumulates = "sum"
    depth_exponents: ClassVar = {"weight": 1.0}

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        if spec.kind == "attention":
            self.weight = nn.Parameter(torch.empty(2))
            self.fp32_parameters = ("weight",)
            # h and x_0 are read, and the sum is written
            self.cost = Cost(3.0 * size.hidden_size, 3.0 * size.hidden_size)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor[0] = 1.0

    def open(self, embedding_btd: Tensor) -> State:
        return State(embedding_btd, embedding_btd)

    def read(self, state: State, weights: None = None) -> tuple[Inputs, Tensor]:
        h = state.h
        if self.spec.kind == "attention":
            # without a dimension, they would be rounded to the dtype of h
            a, b = self.weight.split(1) if self.edit is None else self.edited_weights(h)
            h = (a * h + b * state.embedding).to(h.dtype)
        return (h,), h

    def edited_weights(self, h: Tensor) -> Tensor:
        """Return a and b of each token, as x_bt1, that `edit` makes of the weights. Source 0 is the embedding."""
        return self.edited(per_token(self.weight, h), ("source", "batch", "token"), sources=(1, 0))[..., None]

    def write(self, state: State, output_btd: Tensor, carry: Tensor) -> State:
        return State(carry + output_btd, state.embedding)

    def figures(self, state: State) -> list[Figure]:
        if self.spec.kind != "attention":
            return []
        panels = "a, of the hidden state", "b, of the embedding"
        return [Figure("weights", self.weight, ("panel",), "the weights before each layer", panels=panels)]
