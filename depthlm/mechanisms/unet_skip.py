"""U-net skips, a line of the modded-nanogpt recipe: a layer of the upper half adds the output of its mirror image.

    h <- h + c_l X_{L-l},  before layer l >= L / 2

where layers count from 0 and their outputs X_j from 1: the first layer of the upper half reads the newest of the stored
outputs, the last layer the output of the first. With an odd L, the middle layer has no skip.

X_1 ... X_{L/2} --(the newest first)--> * c_l --(+)-> layer l -> h
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.edges import per_token
from depthlm.model.figures import Figure
from depthlm.model.settings import check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec

# the initial weights of the skips
C = {"paper": 1.0, "identity": 0.0}


class State(NamedTuple):
    """outputs: X_1, X_2, ... of the lower half that no layer has read yet."""

    h: Tensor
    outputs: tuple[Tensor, ...] = ()


class UnetSkip(Connection):
    """A residual connection with one skip for each layer of the upper half.

    start: paper: the weights c are initially 1; identity: 0, so that the decoder initially equals vanilla.
    """

    colour = "#66A61E"
    why_undefined = "its skips add whole hidden states, and their number grows with the depth"
    identity_start = "start=identity"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone, start: str = "paper"):
        super().__init__(spec, size, backbone)
        check(one_of(C, start=start))
        self.start = start
        self.identity_start = "" if start == "identity" else self.identity_start
        half = spec.num_layers // 2
        self.stores = spec.kind == "mlp" and spec.layer < half
        self.adds = spec.kind == "attention" and spec.layer >= spec.num_layers - half
        if self.adds:
            self.c = nn.Parameter(torch.empty(1))
            self.fp32_parameters = ("c",)
            self.cost = Cost(2.0 * size.hidden_size, 3.0 * size.hidden_size)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(C[self.start])

    def open(self, embedding_btd: Tensor) -> State:
        return State(embedding_btd)

    def read(self, state: State, weights: None = None) -> tuple[Inputs, State]:
        if not self.adds:
            return (state.h,), state
        *outputs, newest = state.outputs
        c: Tensor = self.c
        if self.edit is not None:
            axes, source = ("source", "batch", "token"), self.spec.num_layers - self.spec.layer
            c = self.edited(per_token(self.c, newest), axes, [source])[0, ..., None]
        h = (state.h + c * newest).to(state.h.dtype)
        return (h,), State(h, tuple(outputs))

    def write(self, state: State, output_btd: Tensor, carry: State) -> State:
        h = carry.h + output_btd
        return State(h, (*carry.outputs, h) if self.stores else carry.outputs)

    def figures(self, state: State) -> list[Figure]:
        return [Figure("c", self.c, ("panel",), "the weight of each skip")] if self.adds else []
