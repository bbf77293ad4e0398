"""Attention Residuals (arXiv 2603.15031): each sublayer reads an attention over the outputs of earlier sublayers.

    h = sum_j alpha_j b_j,  alpha = softmax_j(w . RMSNorm(b_j))

before each sublayer, and once more before the final norm, each time with a query w and a weight of the norm of its own.
The sources b_j are sums of `block_size` sublayer outputs, and b_0 is the embedding. From the second sublayer of a block
on, the newest source is the running sum of that block.

    [b_0, ..., b_{n-1}, running sum] --attention over depth--> h -> sublayer -> output --(+)--> running sum
                                                                                  or new block: [..., b_n, output]

Inkling 2 ships with a form of it, which the settings below give: h = sum_j alpha_j n_j, n_j = b_j / rms(b_j),
alpha = softmax_j(w . n_j / sqrt(D)), with a query for each of q, k and v in some layers.

Kimi K3 ships with the form above, in blocks of 24 sublayers.

Delta Attention Residuals (arXiv 2605.18855): with routing=additive, a read is x + h, with the residual stream x, which
is the sum of the embedding and all outputs. The first sublayer and the final norm read x alone.

Our addition: with start=identity, a read is (1 - g) x + g h, with a parameter g of each read that is initially 0.
So the decoder initially equals vanilla, and can start from its weights. w is then initially normal: with w = 0, h is x
over the number of sources, and g would have no gradient behind the norm of a sublayer.

Shapes: s reads, n sources, b batch, t tokens, d hidden size, h heads, e their width.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.fields import TINY
from depthlm.model.connection import Connection, Cost, Inputs
from depthlm.model.edges import per_token
from depthlm.model.figures import Figure
from depthlm.model.layers import Linear, ZeroLinear
from depthlm.model.read_ahead import Partial, ReadAhead
from depthlm.model.settings import at_least, boolean, check, format_setting, includes, layers_problems, number, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.depth_reduce import interpolate, source_scores, weighted_sum
from depthlm.ops.dtypes import upcast
from depthlm.ops.functions import rms_norm

STARTS = ("paper", "identity")


class State(NamedTuple):
    """blocks: all sources; within a block, the last one is its running sum.

    normed: with values=normed, RMS(b_j) of every source. ahead: for each later read of the phase, out_sbtd, query_sd
    and lse_sbt over the sources fixed when the phase began, with s = 3 if q, k and v read apart. stream: x, if it is
    read.
    """

    blocks: tuple[Tensor, ...]
    normed: tuple[Tensor, ...] = ()
    ahead: tuple[Partial, ...] = ()
    stream: Tensor | None = None


class AttentionResiduals(Connection):
    """Every sublayer reads an attention over blocks of earlier sublayer outputs.

    block_size: sublayers per block; None: ceil(2L / 8). 1 is the full variant: every sublayer output is a source.
    query: static: a parameter; input_dependent: a projection of the newest source.
    mixing: softmax of the scores; sigmoid of each score; or scalars: a softmax of one parameter per source, without
        query and key norm.
    key_norm: weighted: the scores use RMSNorm(b_j); plain: an RMSNorm without a weight; none: b_j. Runs of earlier
        versions have true for weighted and false for none.
    routing: replace: a read is h; additive: x + h.
    norm_eps: the epsilon of the norm of the sources; None: the backbone's.
    values: raw: the sum is over b_j; normed: over b_j / rms(b_j), except in the first sublayer, which reads the
        embedding as it is and has no parameters.
    scale: whether the scores are divided by sqrt(D).
    window: read only the embedding and so many of the newest sources; None: all.
    heads: slices of D, each with a softmax of its own over its slice of the query and of RMSNorm(b_j). Each has
        ceil(D / heads) dimensions, but the last ones fewer if heads does not divide D.
    separate_qkv: attentions whose q, k and v have a query, and so an input, of their own: None: none, k: those of every
        k-th layer, or a list of layers. In a looped decoder, these are unrolled layers.
    start: paper: queries and scalars are initially zero; identity: they are normal, and reads are (1 - g) x + g h, so
        that the decoder initially equals vanilla.
    """

    colour = "#D55E00"
    identity_start: str | None = "start=identity"
    why_undefined = "with values=normed, every source has the same size, whatever the factor of its outputs"

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        block_size: int | None = None,
        query: str = "static",
        mixing: str = "softmax",
        key_norm: str | bool = "weighted",
        values: str = "raw",
        scale: bool = False,
        window: int | None = None,
        heads: int = 1,
        separate_qkv: int | Sequence[int] | None = None,
        start: str = "paper",
        norm_eps: float | None = None,
        routing: str = "replace",
    ):
        super().__init__(spec, size, backbone)
        check(
            at_least(1, block_size=block_size, optional=True),
            at_least(1, window=window, optional=True),
            at_least(1, heads=heads),
            one_of(("static", "input_dependent"), query=query),
            one_of(("softmax", "sigmoid", "scalars"), mixing=mixing),
            [] if isinstance(key_norm, bool) else one_of(("weighted", "plain", "none"), key_norm=key_norm),
            one_of(("raw", "normed"), values=values),
            boolean(scale=scale),
            one_of(STARTS, start=start),
            one_of(("replace", "additive"), routing=routing),
            layers_problems(spec.num_layers, separate_qkv=separate_qkv),
            [] if norm_eps is None else number(TINY, norm_eps=norm_eps),
        )
        if isinstance(key_norm, bool):
            key_norm = "weighted" if key_norm else "none"
        is_static = query == "static" and mixing == "softmax"
        if separate_qkv is not None and not is_static:
            raise ValueError(f"separate_qkv={format_setting(separate_qkv)}: needs query=static and mixing=softmax")
        if values == "normed" and (key_norm == "none" or mixing == "scalars"):
            raise ValueError(
                "values=normed: the keys are normalized too; needs key_norm=weighted or plain, and no scalars"
            )
        if scale and mixing == "scalars":
            raise ValueError("scale=true: mixing=scalars has no scores")
        if heads > 1 and (mixing == "scalars" or values == "normed" or separate_qkv is not None):
            raise ValueError(f"heads={heads}: needs values=raw, and neither mixing=scalars nor separate_qkv")
        self.adds = routing == "additive"
        if self.adds and start == "identity":
            raise ValueError("routing=additive: has no start=identity")
        self.window, self.heads = window, heads
        self.block_size = block_size or default_block_size(spec)
        # a read is a multiple of the sum of the embedding and these outputs, and is normalized
        self.accumulates = None if values == "normed" else "sum" if window is None else window * self.block_size
        self.has_gate = start == "identity"
        if self.has_gate or self.adds:
            self.accumulates, self.identity_start = "sum", "" if self.has_gate else None
        self.mixing = mixing
        self.norm_eps = backbone.norm_eps if norm_eps is None else norm_eps
        self.normed = values == "normed"
        # None if the operator does not normalize the keys
        self.eps = self.norm_eps if key_norm != "none" and not self.normed else None
        self.factor = math.ceil(size.hidden_size / heads) ** -0.5 if scale else 1.0
        exponent = 0.5 if scale else 1.0
        self.width_exponents = {"query": exponent, "query_proj.weight": 1.0 + exponent}
        blocks = -(-spec.sublayer // self.block_size)
        self.num_sources = 1 + (blocks if window is None else min(blocks, window))
        self.begins_block = spec.sublayer % self.block_size == 0
        self.num_inputs = 3 if spec.kind == "attention" and includes(spec.layer, separate_qkv) else 1
        # the embedding, or with routing=additive the stream, without an attention
        self.reads_plain = (spec.sublayer == 0 and (self.normed or self.adds)) or (self.adds and spec.kind == "final")
        if self.reads_plain:
            return
        passes = 1 if mixing == "scalars" else 2
        self.cost = read_cost(size, self.num_sources, passes, self.num_inputs, self.normed)
        if is_static and window is None and heads == 1:
            two_phase = two_phase_values(spec, size, self.block_size, self.num_inputs, self.normed)
            self.cost = self.cost._replace(two_phase_values=two_phase)
            # the running sum still changes, so it cannot be read ahead
            self.read_ahead = ReadAhead(self, begin, self.extend, self.num_sources - (not self.begins_block))
        if self.has_gate or self.adds:
            # beside the stream, which is that of a residual connection, the sum of the block is written
            self.cost = gated_cost(self.cost, size, self.num_inputs, not self.begins_block, 1.0 if self.adds else 3.0)
        if self.has_gate:
            self.gate = nn.Parameter(torch.empty(self.num_inputs))
            self.fp32_parameters = ("gate",)
        if mixing == "scalars":
            self.scores = nn.Parameter(torch.empty(self.num_sources))
            return
        shape = (3, size.hidden_size) if self.num_inputs == 3 else (size.hidden_size,)
        if query == "static":
            self.query = nn.Parameter(torch.empty(shape))
        else:
            projection = Linear if self.has_gate else ZeroLinear
            self.query_proj = projection(size.hidden_size, size.hidden_size, bias=False)
        if key_norm == "weighted":
            self.key_norm = nn.Parameter(torch.empty(shape))
        self.optimizer_settings = {name: {"weight_decay": 0.0} for name in self._parameters}

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        # a zero query gives equal weights: h is initially the mean of the sources, as in the paper; with sigmoid, half
        # their sum
        tensor.fill_(1.0 if name == "key_norm" else 0.0)
        if self.has_gate and name in ("query", "scores"):
            tensor.normal_(0, std, generator=generator)

    def open(self, embedding_btd: Tensor) -> State:
        normed = (rms_norm(embedding_btd, None, self.norm_eps),) if self.normed else ()
        return State((embedding_btd,), normed, stream=embedding_btd if self.has_gate or self.adds else None)

    def read(self, state: State, weights: Any = None) -> tuple[Inputs, tuple[Partial, ...]]:
        if self.reads_plain:
            return (state.blocks[0] if state.stream is None else state.stream,) * self.num_inputs, ()
        inputs, ahead = self.attend(state, weights)
        if state.stream is not None and self.adds:
            inputs = tuple([state.stream + h for h in inputs])
        elif state.stream is not None:
            inputs = tuple(interpolate(state.stream, h, g) for h, g in zip(inputs, self.gate.split(1), strict=True))
        return inputs, ahead

    def attend(self, state: State, weights: Any) -> tuple[Inputs, tuple[Partial, ...]]:
        """Return h of each input, and the partial results of later reads."""
        if weights is None and self.read_ahead is not None and self.edit is None:
            h_sbtd, ahead = self.read_ahead.read(state.normed or state.blocks, state.ahead)
            return h_sbtd.unbind(), ahead
        alphas = self.weights(state) if weights is None else weights
        if self.heads > 1:
            h_btd = weighted_sum(alphas[0], split(state.blocks, self.heads)).flatten(-2)
            return (h_btd[..., : self.size.hidden_size],), ()
        return tuple(weighted_sum(alpha, state.blocks) for alpha in alphas), ()

    def weights(self, state: State) -> list[Tensor]:
        """Return, for each input, the weights of b_j: alpha_nbt or alpha_n, with values=normed divided by rms(b_j)."""
        alphas = self.alphas(state)
        if not self.normed or self.reads_plain:
            return alphas
        squares_nbt = torch.stack([upcast(b_btd).square().mean(-1) for b_btd in state.blocks])
        return [alpha_nbt * (squares_nbt + self.norm_eps).rsqrt() for alpha_nbt in alphas]

    def alphas(self, state: State) -> list[Tensor]:
        """Return, for each input, alpha_nbt of the sources, alpha_n for scalars, or alpha_nbth with heads."""
        if self.reads_plain:
            return [state.blocks[0].new_ones(1)] * self.num_inputs
        if self.mixing == "scalars":
            alpha_n = self.scores.softmax(0)
            return [alpha_n] if self.edit is None else self.edited_alphas([per_token(alpha_n, state.blocks[0])])
        if hasattr(self, "query_proj"):
            w_btd = self.query_proj(state.blocks[-1]) * self.factor
            queries = [w_btd * self.key_norm if hasattr(self, "key_norm") else w_btd]
        else:
            queries = list(queries_of([self]))
        if self.heads > 1:
            keys = state.blocks if self.eps is None else [rms_norm(b_btd, None, self.eps) for b_btd in state.blocks]
            slices = split([*keys, queries[0].expand_as(keys[0])], self.heads)
            scores = [source_scores(slices[-1], slices[:-1], None)]
        else:
            scores = [source_scores(w, state.normed or state.blocks, self.eps) for w in queries]
        alphas = [score.softmax(0) if self.mixing == "softmax" else score.sigmoid() for score in scores]
        return alphas if self.edit is None else self.edited_alphas(alphas)

    def edited_alphas(self, alphas: list[Tensor]) -> list[Tensor]:
        """Return the alphas that `edit` makes of these. Sources are numbered by their block, 0 is the embedding."""
        blocks = -(-self.spec.sublayer // self.block_size)
        sources = 0, *range(blocks - self.num_sources + 2, blocks + 1)
        axes = ("panel", "source", "batch", "token", "head")[: alphas[0].ndim + 1]
        return list(self.edited(torch.stack(alphas), axes, sources, self.mixing != "sigmoid").unbind())

    def extend(self, partial: Partial, recent: Sequence[Tensor]) -> Tensor:
        return add_sources(partial, recent, self.eps)

    def write(self, state: State, output_btd: Tensor, carry: tuple[Partial, ...]) -> State:
        # in the embedding's dtype, like a residual stream
        kept = len(state.blocks) - (not self.begins_block)
        newest = output_btd if self.begins_block else state.blocks[-1].to(state.blocks[0].dtype) + output_btd
        normed = (*state.normed[:kept], rms_norm(newest, None, self.norm_eps)) if self.normed else ()
        stream = None if state.stream is None else state.stream + output_btd
        return State(self.newest((*state.blocks[:kept], newest)), self.newest(normed), carry, stream)

    def newest(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the sources in the window, the embedding first."""
        return sources if self.window is None else (*sources[:1], *sources[1:][-self.window :])

    def figures(self, state: State) -> list[Figure]:
        if self.adds and self.reads_plain:
            return []
        size = self.block_size
        sources = "then sublayer outputs" if size == 1 else f"then blocks of {size} sublayers"
        alphas = self.alphas(state)
        if self.window is not None:
            sources = f"then the newest of {'sublayer outputs' if size == 1 else f'blocks of {size} sublayers'}"
        gates = [gate_figure(self.gate)] if self.has_gate and not self.reads_plain else []
        shared = figure(alphas[0].mean(-1) if self.heads > 1 else alphas[0], sources)
        if self.num_inputs == 1:
            return [shared, *gates]
        # other layers may have a single input, whose figure has no panels
        separate = shared._replace(name=f"{shared.name}_qkv", values=torch.stack(alphas))
        return [separate._replace(axes=("panel", *shared.axes), panels=("q", "k", "v")), *gates]


def split(sources: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Return x_bthe of each x_btd, padded with zeros if heads does not divide d."""
    padding = -sources[0].shape[-1] % heads
    return [(F.pad(x, (0, padding)) if padding else x).unflatten(-1, (heads, -1)) for x in sources]


def default_block_size(spec: SublayerSpec) -> int:
    """Return the block size that gives at most eight blocks; the paper recommends about eight."""
    return -(-2 * spec.num_layers // 8)


def queries_of(readers: Sequence[Any]) -> Tensor:
    """Return query_sd of the readers, with the weights of their key norms: a score is its product with x / rms(x)."""
    width = readers[0].size.hidden_size
    query_sd = torch.cat([c.query.view(-1, width) for c in readers])
    if hasattr(readers[0], "key_norm"):
        query_sd = query_sd * torch.cat([c.key_norm.view(-1, width) for c in readers])
    return query_sd * readers[0].factor if readers[0].factor != 1 else query_sd


def begin(readers: Sequence[Any], sources: Sequence[Tensor]) -> list[Partial]:
    """Return out_sbtd, query_sd and lse_sbt of each reader over the sources."""
    query_sd = queries_of(readers)
    counts = [c.num_inputs for c in readers]
    partials = zip(
        *(x.split(counts) for x in (*depth_attend(query_sd, sources, readers[0].eps), query_sd)), strict=True
    )
    return [(out_sbtd, query_sd, lse_sbt) for out_sbtd, lse_sbt, query_sd in partials]


def add_sources(partial: Partial, recent: Sequence[Tensor], eps: float | None, bias_n: Tensor | None = None) -> Tensor:
    """Return h_sbtd over the sources of a partial result and the recent ones. bias_n: added to their scores."""
    out_sbtd, query_sd, lse_sbt = partial
    return depth_attend(query_sd, recent, eps, bias_n, (out_sbtd, lse_sbt))[0]


def read_cost(size: Size, num_sources: int, passes: int = 2, num_reads: int = 1, normed: bool = False) -> Cost:
    """Return the cost of a score and a weighted addition per source (Depth-Attention, arXiv 2606.05014, appendix B.4).

    Sources are read for the scores and for the sum, and the sum is written. As in that appendix, the loads that reading
    ahead saves do not count. normed: one more source is normalized: read, and written.
    """
    values = num_reads * (passes * num_sources + 1) + (2 if normed else 0)
    return Cost(2.0 * num_reads * passes * num_sources * size.hidden_size, float(size.hidden_size * values))


def two_phase_values(
    spec: SublayerSpec, size: Size, block_size: int, num_reads: int = 1, normed: bool = False
) -> float:
    """Return the activation values of a read in the two phases of inference (arXiv 2603.15031, Table 1, appendix B).

    Blocks of S sublayers: the first phase makes all reads of a block over the N blocks, which costs each sublayer N/S,
    and writes them. The second phase reads and writes three values and one. A read of its own for each of q, k and v
    writes one value more, and reads and writes it in the second phase.

    With a source per sublayer, phases have S = ceil(2L / 8) sublayers. Sublayer t of phase n reads its share of the
    keys and values of the n S sources before the phase, and those of the t sources in it; both phases write. On average
    this is N + S. normed: as in `read_cost`.
    """
    if block_size > 1:
        in_hidden_states = math.ceil(2 * spec.num_layers / block_size) / block_size + 2 + 3 * num_reads
    else:
        phase, place = divmod(spec.sublayer, default_block_size(spec))
        in_hidden_states = 2 * (phase + place + num_reads)
    return float((in_hidden_states + (2 if normed else 0)) * size.hidden_size)


def gated_cost(cost: Cost, size: Size, num_reads: int, sums: bool = False, flops: float = 3.0) -> Cost:
    """Return a cost with that of (1 - g) x + g h, or of x + h, for each read.

    sums: whether one more sum of outputs is written. flops: of a read, for each dimension, 3 or 1.
    """
    values = 3.0 * (num_reads + sums) * size.hidden_size
    two_phases = None if cost.two_phase_values is None else cost.two_phase_values + values
    return Cost(cost.flops + (flops * num_reads + sums) * size.hidden_size, cost.io_values + values, two_phases)


def gate_figure(gate: Tensor) -> Figure:
    """Return the figure of g of the reads of a sublayer."""
    name, panels = ("gate_qkv", ("q", "k", "v")) if len(gate) == 3 else ("gate", ("g",))
    return Figure(name, gate, ("panel",), "the share of the attention over depth in each read", panels=panels)


def figure(alpha: Tensor, sources: str) -> Figure:
    """Return the figure of alpha_nbt or alpha_n. sources: what follows the embedding."""
    axes = ("source", "batch", "token") if alpha.ndim > 1 else ("source",)
    about = "what each sublayer reads (Figure 8 of arXiv 2603.15031)"
    return Figure("weights", alpha, axes, about, f"source (0: embedding, {sources})")
