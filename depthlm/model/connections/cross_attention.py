"""Generalised residual networks and DeepCrossAttention (arXiv 2502.06785): a block reads a learned combination of all
earlier block outputs, which in v3 depends on the input."""

import torch
from torch import Tensor, nn

from depthlm.kernels.depth_reduce import gated_sum, source_scores, weighted_sum
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.place import Place
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size


class GRN(Connection):
    """Before every block t: g = sum_j beta_j * G_j, with G = [embedding, output of block 1, ..., output of block t-1].

    v1 (section 3.1): beta_j = b_j, a number. v2: b_j in R^D. v3: relu(b_j + w_j . G_j), a gate on top.
    DeepCrossAttention (section 3.2) reads three times: q, k and v each have their own b and w.

    G --+-> g_q, g_k, g_v -> attention --+--(+)-> MLP input -> MLP -(+)-> output of block t, appended to G
        |       `--------------------------- ^                       ^
        |                                `----------------------------'

    A block's output is attention + MLP without the skip, so with b = 1 and w = 0, the start, g is the sum that vanilla
    has. One more read is the final hidden state. The stream is G; between attention and MLP, [*G, attention output, h].

    last_k: G holds [embedding, sum of the outputs before, the last k outputs]; None: all.
    gate, of v3: relu_of_sum, as above; printed, the paper's b_j + relu(w_j . G_j), whose w never gets a gradient at 0.
    w, of v3: per_source, as the paper's parameter counts have it; shared by all sources, as its text.
    separate_qkv: DeepCrossAttention.
    """

    def __init__(
        self,
        place: Place,
        size: Size,
        backbone: Backbone,
        version: int = 3,
        last_k: int | None = None,
        gate: str = "relu_of_sum",
        w: str = "per_source",
        separate_qkv: bool = False,
    ):
        super().__init__(place, size, backbone)
        check(
            one_of((1, 2, 3), version=version),
            at_least(1, last_k=last_k, optional=True),
            one_of(("relu_of_sum", "printed"), gate=gate),
            one_of(("per_source", "shared"), w=w),
            boolean(separate_qkv=separate_qkv),
        )
        self.version, self.last_k, self.gate, self.separate_qkv = version, last_k, gate, separate_qkv
        self.num_sources = place.layer + 1 if last_k is None else min(place.layer + 1, last_k + 2)
        if place.kind == "mlp":
            return
        widths = () if version == 1 else (size.hidden_size,)
        self.b = nn.Parameter(torch.empty(self.num_inputs, self.num_sources, *widths))
        if version == 3:
            self.w = nn.Parameter(torch.empty(self.num_inputs, 1 if w == "shared" else self.num_sources, *widths))
        self.optimizer_settings = {name: {"weight_decay": 0.0} for name, _ in self.named_parameters()}

    @property
    def num_inputs(self) -> int:
        return 3 if self.separate_qkv and self.place.kind == "attention" else 1

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0 if name == "b" else 0.0)

    def read(self, stream: Stream) -> tuple[Inputs, Tensor | None]:
        if self.place.kind == "mlp":
            return (stream[-1],), None
        g = tuple(self.combine(stream, i) for i in range(self.num_inputs))
        return g, g[0]

    def combine(self, sources: Stream, i: int) -> Tensor:
        """g_btd, the i-th of the inputs."""
        if self.version < 3:
            return weighted_sum(self.b[i], sources)
        score_nbt = self.scores(sources, i)
        if self.gate == "relu_of_sum":
            return gated_sum(self.b[i], score_nbt, sources)
        return weighted_sum(self.b[i], sources) + weighted_sum(score_nbt.relu(), sources)

    def scores(self, sources: Stream, i: int) -> Tensor:
        """w_j . G_j of v3, of each source of the i-th input, [n, b, t]."""
        return source_scores(self.w[i].expand(len(sources), -1), sources, eps=None)

    def write(self, stream: Stream, output_btd: Tensor, carry: Tensor | None) -> Stream:
        if carry is not None:
            return [*stream, output_btd, output_btd + carry]
        *stack, attention_btd, _ = stream
        return self.shorten([*stack, attention_btd + output_btd])

    def shorten(self, stack: Stream) -> Stream:
        """The stack with at most `last_k` outputs after the embedding and the sum of the older ones."""
        if self.last_k is None or len(stack) <= self.last_k + 1:
            return stack
        embedding, *middle = stack[: -self.last_k]
        # in the embedding's type: this sum grows with depth, as a residual stream does
        return [embedding, sum(middle[1:], middle[0].to(embedding.dtype)), *stack[-self.last_k :]]

    def forward_flops(self, length: int, causal: bool) -> float:
        reads = 0 if self.place.kind == "mlp" else self.num_inputs
        return (4.0 if self.version == 3 else 2.0) * reads * self.num_sources * self.size.hidden_size

    def io_values(self) -> float:
        reads = 0 if self.place.kind == "mlp" else self.num_inputs
        return float(reads * self.size.hidden_size * ((2 if self.version == 3 else 1) * self.num_sources + 1))
