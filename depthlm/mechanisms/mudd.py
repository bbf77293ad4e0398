"""MUDD, multiway dynamic dense connections (MUDDFormer, arXiv 2502.12170).

    A = GELU(RMS(X_i) W_1) W_2 + a,  x_c = sum_{j <= i} A_cj X_j  for c = q, k, v, r

before layer i + 1, with the embedding X_0 and the output X_j of layer j. q, k and v of its attention have inputs of
their own, and x_r is its residual stream. One more sum gives the final hidden state.

X_0 ... X_i -+-> A -> x_q, x_k, x_v -> attention -(+)-> MLP -(+)-> X_{i+1}
             `------> x_r ----------------------^

Shapes: c inputs, n sources, b batch, t tokens, d hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear, ZeroLinear
from depthlm.model.settings import at_least, check, includes, layers_problems
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import weighted_sum
from depthlm.ops.dtypes import upcast
from depthlm.ops.functions import rms_norm


class State(NamedTuple):
    """blocks: X_i and those X_j that are read. h: the residual stream within layer i + 1, and X_i between layers."""

    blocks: tuple[Tensor, ...]
    h: Tensor


class Mudd(Connection):
    """Dynamic weighted sums of all layer outputs, initially X_i, so that the decoder equals vanilla.

    Layer 0 reads the embedding. W_1 is as wide as there are weights, as in the code of the authors.

    layers: k: only the last k (unrolled) layers and the final read have sums, and the others are those of vanilla, as
        in the record run of modded-nanogpt (pull request 259, with one layer); None: all layers.
    sources: the j of the X_j that are read beside the newest: a list; k: every k-th, X_{k-1}, X_{2k-1}, ...; None: all.
    """

    colour = "#E7298A"
    why_undefined = "the matrices that give its weights grow with the depth"
    identity_start = ""

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        layers: int | None = None,
        sources: int | Sequence[int] | None = None,
    ):
        super().__init__(spec, size, backbone)
        check(at_least(1, layers=layers, optional=True), layers_problems(spec.num_layers, sources=sources))
        self.eps = backbone.norm_eps
        read = [j for j in range(spec.layer + 1) if sources is None or includes(j, sources)]
        self.keeps_newest = spec.layer in read
        self.sources = (*(j for j in read if j < spec.layer), spec.layer)
        self.sums = spec.kind != "mlp" and spec.layer >= max(1, spec.num_layers - (layers or spec.num_layers))
        if self.sums:
            d, n = size.hidden_size, len(self.sources)
            self.num_inputs = 3 if spec.kind == "attention" else 1
            self.num_sums = 4 if spec.kind == "attention" else 1
            self.a = nn.Parameter(torch.empty(self.num_sums, n))
            self.optimizer_settings = {"a": {"weight_decay": 0.0}}
            self.w_1 = Linear(d, self.num_sums * n, bias=False)
            self.w_2 = ZeroLinear(self.num_sums * n, self.num_sums * n, bias=False)
            # X_i is read for A
            self.cost = Cost(2.0 * self.num_sums * n * d, float(d * (1 + self.num_sums * (n + 1))))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor[:, -1] = 1.0

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,), embedding_btd)

    def read(self, state: State, weights: Tensor | None = None) -> tuple[Inputs, Tensor]:
        """Return the inputs, and the residual stream to which the output is added."""
        weights = self.weights(state) if weights is None else weights
        if weights is None:
            return (state.h,), state.h
        *inputs, residual = (weighted_sum(weight_nbt, state.blocks) for weight_nbt in weights)
        return tuple(inputs) or (residual,), residual

    def weights(self, state: State) -> Tensor | None:
        """Return A_cnbt."""
        if not self.sums:
            return None
        newest = rms_norm(state.blocks[-1], None, self.eps)
        dynamic = upcast(self.w_2(F.gelu(self.w_1(newest)))).unflatten(-1, self.a.shape)
        return self.edited((dynamic + self.a).permute(2, 3, 0, 1), ("panel", "source", "batch", "token"), self.sources)

    def write(self, state: State, output_btd: Tensor, carry: Tensor) -> State:
        h = carry + output_btd
        if self.spec.kind == "attention":
            return State(state.blocks, h)
        return State((*(state.blocks if self.keeps_newest else state.blocks[:-1]), h), h)

    def figures(self, state: State) -> list[Figure]:
        weights = self.weights(state)
        if weights is None:
            return []
        panels = ("q", "k", "v", "residual")[-self.num_sums :]
        axes, columns = ("panel", "source", "batch", "token"), "source (0: embedding, j: output of layer j)"
        return [Figure("weights", weights, axes, "what each layer reads", columns, panels, self.sources)]
