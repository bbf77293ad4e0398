"""One layer: an attention and an MLP, each with a read from the depth stream and a write to it.

Shapes: b batch, t tokens, d hidden size.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from depthlm.model.attention import Mixer
from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV, SelfAttention
from depthlm.model.connection import Connection, Inputs, State
from depthlm.model.experts import Experts, Mixture, Routing
from depthlm.model.layers import MLP, Norm, Rope
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, Dropout, apply_dropout


class Observer:
    """Receives the inputs and outputs of every sublayer of a decoder. By default each method does nothing.

    In a looped decoder, the layer of a SublayerSpec is the unrolled position. With activation checkpointing, the
    recomputation of a layer calls these methods again.
    """

    def open(self, embedding_btd: Tensor) -> None:
        """Called before the first connection opens the state."""

    def layer(self, position: int, state: State, depth: DepthKV) -> None:
        """Called before each unrolled layer, and once after the last one, with what it gets from the one before."""

    def read(self, connection: Connection, state: State) -> None:
        """Called before a connection, including the final one, reads this state."""

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        context: AttentionContext,
    ) -> None:
        """Called before `SelfAttention.attend`, with its arguments."""

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        """Called before a connection writes the output of its sublayer."""


UNOBSERVED = Observer()
Connections = tuple[Connection, Connection]


class Layer(nn.Module):
    """An attention and an MLP with their norms. All mechanisms share this code.

    state --+-> read --> norm -> project -> attend --> output ---> write -+-> read --> norm -> MLP ---> write -> state
            |     `----------------------carry----------------------^     |     `--------carry-----------^
            `---------------------------state-----------------------'     `-------------state------------'

    With post-norm, the norm follows `output` and the MLP instead; with both, there are two. The MLP may be a mixture of
    experts, and the attention another mixer over the sequence. torch.compile compiles `project`, `output` and
    `transform`, or, where all connections have `is_compiled`, `before_attention` and `after_attention`, which call
    them.

    index: the place of the layer. num_inputs: the largest number of inputs that connections of the attention and of the
    MLP return.
    """

    def __init__(self, index: int, attention: Mixer, size: Size, backbone: Backbone, num_inputs: tuple[int, int]):
        super().__init__()
        self.pre_norm = backbone.norm_placement in ("pre", "both")
        # the only norm of a sublayer has the same name before and after it
        self.post_norm = {"post": "norm", "both": "post_norm"}.get(backbone.norm_placement)
        self.only_q = isinstance(attention, SelfAttention) and not attention.projects_kv
        num_inputs = (1 if self.only_q else num_inputs[0], num_inputs[1])
        counts = num_inputs if self.pre_norm else (1, 1)
        if backbone.norm_placement != "none":
            self.attention_norm = _norms(counts[0], size, backbone)
        self.attention = attention
        if isinstance(attention, SelfAttention):
            attention.separate_inputs = num_inputs[0] == 3
        if backbone.norm_placement != "none":
            self.mlp_norm = _norms(counts[1], size, backbone)
        if backbone.norm_placement == "both":
            self.attention_post_norm = Norm(size.hidden_size, backbone)
            self.mlp_post_norm = Norm(size.hidden_size, backbone)
        sparse = backbone.mlp == "experts" and index >= backbone.dense_layers
        dense = MLP(size.hidden_size, size.intermediate_size, backbone) if not sparse else None
        self.mlp: MLP | Mixture = dense or Mixture(size, backbone)

    def set_output_gain(self, attention: float, mlp: float) -> None:
        """Set the factor of the standard deviation with which values, outputs and MLP matrices are initialized."""
        for name, module in self.named_modules():
            if name in ("attention.v_proj", "attention.o_proj"):
                module.init_gain = attention
            elif name == "attention.kv_b_proj":
                module.init_value_gain = self.attention.num_heads, attention
            elif name.startswith("mlp.") and isinstance(module, nn.Linear | Experts):
                module.init_gain = mlp  # type: ignore[assignment]

    def forward(
        self,
        state: State,
        depth: DepthKV,
        connections: Connections,
        rope: Rope | None,
        context: AttentionContext,
        observer: Observer = UNOBSERVED,
    ) -> tuple[State, DepthKV, Routing | None]:
        """Return the state, the depth list, and the routing of a mixture of experts.

        context: which earlier tokens are visible, the cache, and the dropout.
        """
        before_attention, after_attention = self.before_attention, self.after_attention
        if observer is not UNOBSERVED:
            # an observer needs the methods of the class, since those of this layer may be compiled (compilation.py)
            before_attention = partial(Layer.before_attention, self, observer=observer)
            after_attention = partial(Layer.after_attention, self, observer=observer)
        projected, carry = before_attention(connections[0], state, rope)
        if isinstance(self.attention, SelfAttention):
            observer.attend(connections[0].spec, self.attention, projected, depth, context)
        attended, depth = self.attention.attend(projected, depth, context)
        state, entry, routing = after_attention(connections, state, carry, attended, rope, context.dropout)
        return state, self.attention.after_mlp(entry, depth), routing

    def before_attention(
        self, connection: Connection, state: State, rope: Rope | None, observer: Observer = UNOBSERVED
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Read for the attention. Return the result of `SelfAttention.project`, and the carry."""
        observer.read(connection, state)
        inputs, carry = connection.read(state)
        return self.project(inputs, rope), carry

    def after_attention(
        self,
        connections: Connections,
        state: State,
        carry: Any,
        attended: Any,
        rope: Rope | None,
        dropout: Dropout | None = None,
        observer: Observer = UNOBSERVED,
    ) -> tuple[State, tuple[Tensor, ...], Routing | None]:
        """Write the output of the attention, and read and write for the MLP.

        attended: what `attend` of the mixer returned. dropout: the dropout of this layer.
        Return the state, the result of `SelfAttention.project_mlp` for the input of the MLP, and the routing.
        """
        for_attention, for_mlp = connections
        output_btd = self.output(attended, dropout)
        observer.write(for_attention.spec, output_btd)
        state = for_attention.write(state, output_btd, carry)
        observer.read(for_mlp, state)
        inputs, carry = for_mlp.read(state)
        output_btd, entry, routing = self.transform(inputs, rope, dropout)
        observer.write(for_mlp.spec, output_btd)
        return for_mlp.write(state, output_btd, carry), entry, routing

    def project(self, inputs: Inputs, rope: Rope | None) -> tuple[Tensor, ...]:
        """Return the result of `SelfAttention.project` for the inputs of a connection."""
        inputs = inputs[:1] if self.only_q else inputs
        if self.pre_norm:
            inputs = _apply_norms(self.attention_norm, inputs)
        q_in, k_in, v_in = inputs if len(inputs) == 3 else inputs * 3
        return self.attention.project(q_in, k_in, v_in, rope)

    def output(self, attended: Any, dropout: Dropout | None = None) -> Tensor:
        """Return output_btd of the attention sublayer. attended: what `attend` of its mixer returned."""
        return apply_dropout(
            self._normed_output("attention", self.attention.output(attended)), dropout, ATTENTION_OUTPUT
        )

    def transform(
        self, inputs: Inputs, rope: Rope | None, dropout: Dropout | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...], Routing | None]:
        """Return output_btd of the MLP, the result of `SelfAttention.project_mlp` for its input, and the routing."""
        if self.pre_norm:
            inputs = _apply_norms(self.mlp_norm, inputs)
        if isinstance(self.mlp, Mixture):
            output_btd, routing = self.mlp(inputs[0])
        else:
            output_btd, routing = self.mlp(inputs[0], dropout), None
        entry = self.attention.project_mlp(inputs[0], rope)
        return apply_dropout(self._normed_output("mlp", output_btd), dropout, MLP_OUTPUT), entry, routing

    def _normed_output(self, sublayer: str, output_btd: Tensor) -> Tensor:
        return getattr(self, f"{sublayer}_{self.post_norm}")(output_btd) if self.post_norm else output_btd


def _norms(count: int, size: Size, backbone: Backbone) -> nn.Module:
    if count == 1:
        return Norm(size.hidden_size, backbone)
    return nn.ModuleList(Norm(size.hidden_size, backbone) for _ in range(count))


def _apply_norms(norm: nn.Module, inputs: Inputs) -> Inputs:
    norms = norm if isinstance(norm, nn.ModuleList) else (norm,)
    # in another loop, q, k and v have inputs of their own
    inputs = inputs if len(inputs) == len(norms) else inputs * len(norms)
    return tuple(norm(x) for norm, x in zip(norms, inputs, strict=True))
