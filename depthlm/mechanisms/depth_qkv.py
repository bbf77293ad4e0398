"""Depth Attention, a design of MoDA (arXiv 2603.15619, section 2.2 and Table 1).

    q_s, k_s, v_s = W X_s, with the embedding X_0 and the output X_s of sublayer s - 1
    h_s = attention of q_s to k_0, ..., k_s and v_0, ..., v_s of the same position, for each head

    X_s -+-> q_s --------------------------.
         `-> k_s, v_s -> k_0 ... k_s, v_0 ... v_s --attention--> h_s -> sublayer -> X_{s+1}

Shapes: b batch, t tokens, k key/value heads, g query heads per key/value head, e width of a head, n sources.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_reduce import source_scores, weighted_sum
from depthlm.ops.functions import linear_together


class State(NamedTuple):
    """newest: X_s. keys, values: k_j and v_j of all outputs before it, x_btke."""

    newest: Tensor
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()


class DepthQKV(Connection):
    """Every sublayer reads an attention over depth keys and values, with a query from the newest output.

    The paper writes q, k and v after a sublayer; here the next sublayer projects them before it reads, which is the
    same.

    Assumed: the layers of the paper are sublayers, and the final hidden state is one more read. The heads are those of
    the backbone, but as wide as hidden_size / num_heads. Neither queries nor keys have a norm or RoPE.
    """

    accumulates = "sum"

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        d = size.hidden_size
        if d % size.num_heads:
            raise ValueError(f"size.num_heads={size.num_heads}: must divide size.hidden_size={d} for heads over depth")
        self.head_size = self.key_size = d // size.num_heads
        num_sources = spec.sublayer + 1
        kv_width = size.num_kv_heads * self.head_size
        self.q_proj = Linear(d, d, bias=False)
        self.k_proj = Linear(d, kv_width, bias=False)
        self.v_proj = Linear(d, kv_width, bias=False)
        # the newest output, the query and h, and the keys and values written and read
        self.cost = Cost(4.0 * d * num_sources, 3.0 * d + 2.0 * kv_width * (num_sources + 1))

    def open(self, embedding_btd: Tensor) -> State:
        return State(embedding_btd)

    def read(self, state: State, weights: Sequence[Tensor] | None = None) -> tuple[Inputs, State]:
        q, keys, values = self.project(state)
        alphas = self.alphas(q, keys) if weights is None else weights
        h_btkge = torch.stack([weighted_sum(alpha_nbtk, values) for alpha_nbtk in alphas], 3)
        return (h_btkge.flatten(2),), State(state.newest, keys, values)

    def weights(self, state: State) -> list[Tensor]:
        """Return alpha_nbtk of each of the g queries."""
        q, keys, _ = self.project(state)
        return self.alphas(q, keys)

    def project(self, state: State) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return q_bt(kge), and the keys and values with those of the newest output."""
        q, k, v = linear_together(state.newest, self.q_proj, self.k_proj, self.v_proj)
        k_btke, v_btke = (x.unflatten(-1, (-1, self.head_size)) for x in (k, v))
        return q, (*state.keys, k_btke), (*state.values, v_btke)

    def alphas(self, q: Tensor, keys: Sequence[Tensor]) -> list[Tensor]:
        q_btkge = q.unflatten(-1, (self.size.num_kv_heads, -1, self.head_size)) * self.head_size**-0.5
        alphas = [source_scores(q_btke, keys, eps=None).softmax(0) for q_btke in q_btkge.unbind(3)]
        if self.edit is None:
            return alphas
        axes = ("head", "source", "batch", "token", "kv_head")
        return list(self.edited(torch.stack(alphas), axes, normalized=True).unbind())

    def write(self, state: State, output_btd: Tensor, carry: State) -> State:
        return State(output_btd, carry.keys, carry.values)

    def figures(self, state: State) -> list[Figure]:
        alpha_nbtkg = torch.stack(self.weights(state), -1)
        axes = ("source", "batch", "token", "head")
        return [Figure("weights", alpha_nbtkg.flatten(3), axes, "what each sublayer reads")]
