"""Depth Attention, a design of MoDA (arXiv 2603.15619, section 2.2 and Table 1).

Shapes: b batch, t tokens, k key/value heads, g query heads per key/value head, e width of a head, n sources.
"""

import torch
from torch import Tensor

from depthlm.kernels.depth_reduce import source_scores, weighted_sum
from depthlm.kernels.functions import linear_together
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.layers import Linear
from depthlm.model.shape import Backbone, Size
from depthlm.model.sublayer_spec import SublayerSpec


class DepthQKV(Connection):
    """Every sublayer reads an attention over depth keys and values, with a query from the newest output.

    q_s, k_s, v_s = W X_s, with the embedding X_0 and the output X_s of sublayer s - 1
    h_s = attention of q_s to k_0, ..., k_s and v_0, ..., v_s of the same position, for each head

    The stream is [k_0, v_0, ..., k_{s-1}, v_{s-1}, X_s]: the paper writes q, k and v after a sublayer; here the next
    sublayer projects them before it reads, which is the same.

    Assumed: the layers of the paper are sublayers, and the final hidden state is one more read. The heads are those of
    the backbone, but as wide as hidden_size / num_heads. Neither queries nor keys have a norm or RoPE.
    """

    def __init__(self, spec: SublayerSpec, size: Size, backbone: Backbone):
        super().__init__(spec, size, backbone)
        d = size.hidden_size
        if d % size.num_heads:
            raise ValueError(f"size.num_heads={size.num_heads}: must divide size.hidden_size={d} for heads over depth")
        self.head_size, self.num_sources = d // size.num_heads, spec.sublayer + 1
        self.kv_width = size.num_kv_heads * self.head_size
        self.q_proj = Linear(d, d, bias=False)
        self.k_proj, self.v_proj = (Linear(d, self.kv_width, bias=False) for _ in "kv")

    def read(self, stream: Stream) -> tuple[Inputs, Stream]:
        return self.attend(stream, constant=False)

    def linear_read(self, stream: Stream) -> tuple[Inputs, Stream]:
        return self.attend(stream, constant=True)

    def attend(self, stream: Stream, constant: bool) -> tuple[Inputs, Stream]:
        """Return h, and the keys and values with those of the newest output. constant: whether alpha is detached."""
        *entries, newest = stream
        q, *newest_entry = linear_together(newest, self.q_proj, self.k_proj, self.v_proj)
        q_btkge = q.unflatten(-1, (self.size.num_kv_heads, -1, self.head_size)) * self.head_size**-0.5
        entries += [x.unflatten(-1, (-1, self.head_size)) for x in newest_entry]
        keys, values = entries[::2], entries[1::2]
        alphas = [source_scores(q_btke, keys, eps=None).softmax(0) for q_btke in q_btkge.unbind(3)]
        h_btkge = torch.stack([weighted_sum(a.detach() if constant else a, values) for a in alphas], 3)
        return (h_btkge.flatten(2),), entries

    def write(self, stream: Stream, output_btd: Tensor, carry: Stream) -> Stream:
        return [*carry, output_btd]

    def forward_flops(self, length: float, causal: bool) -> float:
        return 4.0 * self.size.hidden_size * self.num_sources

    def io_values(self) -> float:
        """Return the values of the newest output, the query and h, and of the keys and values written and read."""
        return 3.0 * self.size.hidden_size + 2.0 * self.kv_width * (self.num_sources + 1)
