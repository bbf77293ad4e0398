"""DeepCrossAttention and generalised residual networks, GRN (arXiv 2502.06785).

    g = sum_j beta_j * G_j,  G = [embedding, output of block 1, ..., output of block t-1]

before block t, where a block is one layer and its output is attention + MLP without the skip:

    GRN-v1 (section 3.1): beta_j = b_j, a scalar     v2: beta_j = b_j in R^D
    v3: beta_j = relu(b_j + w_j . G_j) with b_j and w_j in R^D; the score w_j . G_j is added to every dimension

In DeepCrossAttention (section 3.2), q, k and v are three such reads, each with its own b and w.

    G -> g_q, g_k, g_v -> attention a = attention(g_q, g_k, g_v)
                            |-> m = MLP(g_q + a)
                            `-> a + m, the output of block t, appended to G

Shapes: s reads, n sources, b batch, t tokens, d hidden size.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.figures import Figure
from depthlm.model.read_ahead import Partial, ReadAhead
from depthlm.model.settings import at_least, boolean, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dca.naive import gated_reads
from depthlm.ops.denseformer.naive import weighted_reads
from depthlm.ops.depth_reduce import source_scores, weighted_sum


class State(NamedTuple):
    """blocks: G. attention, mlp_input: of the current block, between its attention and its MLP.

    ahead: for each later reader of a phase, its partial sums g_sbtd over the blocks that existed when the phase began.
    """

    blocks: tuple[Tensor, ...]
    attention: Tensor | None = None
    mlp_input: Tensor | None = None
    ahead: tuple[Partial, ...] = ()


class Carry(NamedTuple):
    """g: g_q, or the only input of a GRN, to which the output of the attention is added. ahead: as in `State`."""

    g: Tensor
    ahead: tuple[Partial, ...] = ()


class DeepCrossAttention(Connection):
    """Every block reads a learned combination of all earlier block outputs. A last read gives the final hidden state.

    With the initial b = 1 and w = 0, g equals the residual stream of vanilla.

    version: 1, 2 or 3, of GRN.
    last_k: k; G is then [embedding, sum of the older outputs, the last k outputs]; None: G contains all outputs.
    own_embedding: with last_k, whether the embedding is a source of its own; if not, it is added to the older outputs.
    gate: for v3; relu_of_sum, as above, or printed, the paper's b_j + relu(w_j . G_j), whose w stays at its initial 0.
    w: for v3; per_source, which matches the paper's parameter counts, or shared by all sources, as in the paper's text.
    separate_qkv: whether q, k and v have separate reads; if not, it is a GRN.
    """

    colour = "#009E73"
    identity_start = ""
    accumulates = "sum"
    width_exponents: ClassVar = {"w": 1.0}

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        version: int = 3,
        last_k: int | None = None,
        own_embedding: bool = True,
        gate: str = "relu_of_sum",
        w: str = "per_source",
        separate_qkv: bool = True,
    ):
        super().__init__(spec, size, backbone)
        check(
            one_of((1, 2, 3), version=version),
            at_least(1, last_k=last_k, optional=True),
            one_of(("relu_of_sum", "printed"), gate=gate),
            one_of(("per_source", "shared"), w=w),
            boolean(own_embedding=own_embedding, separate_qkv=separate_qkv),
        )
        if last_k is None and not own_embedding:
            raise ValueError("own_embedding=false: needs last_k")
        self.version = version
        self.last_k = last_k
        self.own_embedding = own_embedding
        self.gate = gate
        if spec.kind == "mlp":
            return
        self.num_inputs = 3 if separate_qkv and spec.kind == "attention" else 1
        n = spec.layer + 1 if last_k is None else min(spec.layer + 1, last_k + 1 + own_embedding)
        d, passes = size.hidden_size, 2 if version == 3 else 1
        self.cost = Cost(2.0 * passes * self.num_inputs * n * d, float(self.num_inputs * d * (passes * n + 1)))
        widths = () if version == 1 else (d,)
        self.b = nn.Parameter(torch.empty(self.num_inputs, n, *widths))
        if version == 3:
            self.w = nn.Parameter(torch.empty(self.num_inputs, 1 if w == "shared" else n, *widths))
        self.optimizer_settings = {name: {"weight_decay": 0.0} for name, _ in self.named_parameters()}
        # the fused operators compute all inputs in one pass; with last_k, the sum of the older outputs changes at every
        # block, so a pass cannot serve later blocks
        self.is_fused = version == 1 or (version == 3 and gate == "relu_of_sum")
        if self.is_fused and last_k is None:
            self.read_ahead = ReadAhead(self, self.begin, self.extend, num_fixed=n)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.fill_(1.0 if name == "b" else 0.0)

    def open(self, embedding_btd: Tensor) -> State:
        return State((embedding_btd,))

    def read(self, state: State, weights: Sequence[Tensor] | None = None) -> tuple[Inputs, Carry | None]:
        if self.spec.kind == "mlp":
            # computed by the write of the attention
            assert state.mlp_input is not None
            return (state.mlp_input,), None
        ahead: tuple[Partial, ...] = ()
        if self.edit is not None and weights is None:
            weights = self.edited_weights(state)
        if weights is not None:
            inputs = tuple(gated_sum(beta_nbtd, state.blocks) for beta_nbtd in weights)
        elif self.read_ahead is not None:
            g_sbtd, ahead = self.read_ahead.read(state.blocks, state.ahead)
            inputs = g_sbtd.unbind()
        elif self.is_fused:
            inputs = self.read_fused([self], slice(None), state.blocks).unbind()
        else:
            inputs = tuple(self.read_unfused(state, i) for i in range(self.num_inputs))
        return inputs, Carry(inputs[0], ahead)

    def weights(self, state: State) -> list[Tensor] | None:
        """Return beta_nbtd of v3 for each input."""
        if self.spec.kind == "mlp" or self.version < 3:
            return None
        betas = []
        # the same gates as in `read_unfused` and in the operator
        for i, b_nd in enumerate(self.b):
            b, score = b_nd[:, None, None], self.scores(state, i)[..., None]
            betas.append((b + score).relu() if self.gate == "relu_of_sum" else b + score.relu())
        return betas

    def edited_weights(self, state: State) -> list[Tensor]:
        """Return beta_nbtd of each input that `edit` makes of the weights; the last axis may have one entry.

        A source is numbered by its block, 0 is the embedding; the sum of older blocks has the number of the oldest.
        """
        betas = self.weights(state)
        if betas is None:
            x_btd = state.blocks[0]
            betas = [b[:, None, None].expand(-1, *x_btd.shape[:2], -1) for b in self.b.view(*self.b.shape[:2], -1)]
        blocks, kept = self.spec.layer + 1, len(state.blocks)
        oldest = range(1 + self.own_embedding)
        sources = range(kept) if kept == blocks else [*oldest, *range(blocks - kept + len(oldest), blocks)]
        axes = ("panel", "source", "batch", "token", "hidden")
        return list(self.edited(torch.stack(betas), axes, sources).unbind())

    def scores(self, state: State, i: int) -> Tensor:
        """Return w_j . G_j of v3 for all sources of the i-th input, [n, b, t]."""
        return source_scores(self.w[i].expand(len(state.blocks), -1), state.blocks, eps=None)

    def read_unfused(self, state: State, i: int) -> Tensor:
        """Return g_btd, the i-th input, of v2 and of v3 with the printed gate, which have no operator of their own."""
        g = weighted_sum(self.b[i], state.blocks)
        return g if self.version == 2 else g + weighted_sum(self.scores(state, i).relu(), state.blocks)

    def begin(self, readers: "Sequence[DeepCrossAttention]", sources: Sequence[Tensor]) -> list[Partial]:
        """Return the partial sums of all readers of a phase (see `ReadAhead`) over these sources."""
        g_sbtd = self.read_fused(readers, slice(0, len(sources)), sources)
        return [(g,) for g in g_sbtd.split([c.num_inputs for c in readers])]

    def extend(self, partial: Partial, recent: Sequence[Tensor]) -> Tensor:
        """Return g_sbtd: a partial sum of this reader, and the sources that were written since."""
        (g_sbtd,) = partial
        return self.read_fused([self], slice(-len(recent), None), recent, g_sbtd)

    def read_fused(
        self,
        readers: "Sequence[DeepCrossAttention]",
        part: slice,
        sources: Sequence[Tensor],
        start_sbtd: Tensor | None = None,
    ) -> Tensor:
        """Return g_sbtd, all inputs of the readers, summed over a part of their sources and added to start_sbtd."""
        # [s, n] in v1, else [s, n, d]
        b = torch.cat([c.b[:, part] for c in readers])
        if self.version == 1:
            return weighted_reads(b, sources, start_sbtd)
        w_snd = torch.cat([(c.w if c.w.shape[1] == 1 else c.w[:, part]).expand(-1, len(sources), -1) for c in readers])
        return gated_reads(b, w_snd, sources, start_sbtd)

    def write(self, state: State, output_btd: Tensor, carry: Carry | None) -> State:
        if carry is not None:
            return State(state.blocks, output_btd, output_btd + carry.g, carry.ahead)
        assert state.attention is not None
        return State(self.shorten((*state.blocks, state.attention + output_btd)), ahead=state.ahead)

    def shorten(self, blocks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the blocks with the sum of all outputs that are older than the `last_k` newest."""
        first = int(self.own_embedding)
        if self.last_k is None or len(blocks) <= self.last_k + first:
            return blocks
        oldest, *older = blocks[first : -self.last_k]
        # in the embedding's dtype, because this sum grows with depth like a residual stream
        return (*blocks[:first], sum(older, oldest.to(blocks[0].dtype)), *blocks[-self.last_k :])

    def figures(self, state: State) -> list[Figure]:
        if self.spec.kind == "mlp":
            return []
        num_sources = len(state.blocks)
        # the sum of older blocks has one weight, with which each of these blocks is drawn
        num_repeats = self.spec.layer + 1 - num_sources
        source_of_block = [0, *([int(self.own_embedding)] * num_repeats), *range(1, num_sources)]
        axes, columns = ("panel", "source"), "source (0: embedding, j: output of block j)"
        about = "learned biases b of each block over earlier blocks (arXiv 2502.06785)"
        b_axes = (*axes, "hidden")[: self.b.ndim]
        panels = ("q", "k", "v") if self.num_inputs == 3 else ("input",)
        drawn = [Figure("b", self.b[:, source_of_block], b_axes, about, columns, panels)]
        betas = self.weights(state)
        if betas is not None:
            beta_inbt = torch.stack([beta_nbtd.mean(-1) for beta_nbtd in betas])[:, source_of_block]
            about = "the gated weights of each block over earlier blocks, mean over the hidden size"
            drawn.append(Figure("weights", beta_inbt, (*axes, "batch", "token"), about, columns, panels))
        return drawn


def gated_sum(beta_nbtd: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Return sum_j beta_j * G_j."""
    return sum((beta * x for beta, x in zip(beta_nbtd, blocks, strict=True)), torch.zeros_like(blocks[0]))
