"""One layer: an attention and an MLP, each with a read from the depth stream and a write to it.

Shapes: b batch, t tokens, d hidden size, v vocabulary.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from depthlm.model.attention.mixers import Mixer
from depthlm.model.attention.self_attention import AttentionContext, DepthKV, SelfAttention
from depthlm.model.connections.connection import Connection, Inputs, Stream
from depthlm.model.experts import Mixture, Routing
from depthlm.model.layers import MLP, Norm, Rope
from depthlm.model.observer import UNOBSERVED, Observer
from depthlm.model.shape import Backbone, Size


class Layer(nn.Module):
    """An attention and an MLP with their norms. All mechanisms share this code.

    stream --+-> read --> norm -> project -> attend --> output ---> write -+-> read --> norm -> MLP ---> write -> stream
             |     `----------------------carry----------------------^     |     `--------carry-----------^
             `---------------------------stream----------------------'     `-------------stream-----------'

    With post-norm, the norm follows `output` and the MLP instead. The MLP may be a mixture of experts, and the
    attention another mixer over the sequence.

    index: the place of the layer. num_inputs: of the attention and the MLP, how many their connections pass to them.
    """

    def __init__(self, index: int, attention: Mixer, size: Size, backbone: Backbone, num_inputs: tuple[int, int]):
        super().__init__()
        self.pre_norm = backbone.norm_placement == "pre"
        counts = num_inputs if self.pre_norm else (1, 1)
        self.attention_norm = _norms(counts[0], size, backbone)
        self.attention = attention
        if isinstance(attention, SelfAttention):
            attention.separate_inputs = num_inputs[0] == 3
        self.mlp_norm = _norms(counts[1], size, backbone)
        sparse = backbone.mlp == "experts" and index >= backbone.dense_layers
        dense = MLP(size.hidden_size, size.intermediate_size, backbone) if not sparse else None
        self.mlp: MLP | Mixture = dense or Mixture(size, backbone)
        self.regions = self.sublayer_regions = Regions()

    def forward(
        self,
        stream: Stream,
        depth: DepthKV,
        connections: tuple[Connection, Connection],
        rope: Rope | None,
        past: AttentionContext,
        observer: Observer = UNOBSERVED,
    ) -> tuple[Stream, DepthKV, Routing | None]:
        """Return the stream, the depth list, and the routing of a mixture of experts."""
        whole = observer is UNOBSERVED and all(connection.is_compiled for connection in connections)
        regions = self.regions if whole else self.sublayer_regions
        projected, carry = regions.enter(self, connections[0], stream, rope, observer)
        if isinstance(self.attention, SelfAttention):
            observer.attend(connections[0].spec, self.attention, projected, depth, past)
        context, depth = self.attention.attend(projected, depth, past)
        stream, projected, routing = regions.leave(self, connections, stream, carry, context, rope, observer)
        return stream, self.attention.after_mlp(projected, depth), routing


def project(layer: Layer, inputs: Inputs, rope: Rope | None) -> tuple[Tensor, ...]:
    """Return what `SelfAttention.project` makes of the inputs of a connection."""
    if layer.pre_norm:
        inputs = _normed(layer.attention_norm, inputs)
    q_in, k_in, v_in = inputs if len(inputs) == 3 else inputs * 3
    return layer.attention.project(q_in, k_in, v_in, rope)


def output(layer: Layer, context: Any) -> Tensor:
    """Return output_btd of the attention sublayer. context: what `attend` of its mixer returned."""
    output_btd = layer.attention.output(context)
    return output_btd if layer.pre_norm else layer.attention_norm(output_btd)


def transform(layer: Layer, inputs: Inputs, rope: Rope | None) -> tuple[Tensor, tuple[Tensor, ...], Routing | None]:
    """Return output_btd of the MLP sublayer, what `SelfAttention.project_mlp` makes of its input, and the routing."""
    if layer.pre_norm:
        inputs = _normed(layer.mlp_norm, inputs)
    output_btd, routing = layer.mlp(inputs[0]) if isinstance(layer.mlp, Mixture) else (layer.mlp(inputs[0]), None)
    projected = layer.attention.project_mlp(inputs[0], rope)
    return (output_btd if layer.pre_norm else layer.mlp_norm(output_btd)), projected, routing


class Sublayers(NamedTuple):
    """The functions between the read and the write of a connection. Compiled, they take any connection."""

    project: Any = project
    output: Any = output
    transform: Any = transform


PLAIN = Sublayers()


def enter(
    layer: Layer,
    connection: Connection,
    stream: Stream,
    rope: Rope | None,
    observer: Observer,
    sublayers: Sublayers = PLAIN,
) -> tuple[tuple[Tensor, ...], Any]:
    """Read for the attention. Return what `SelfAttention.project` makes of it, and the carry."""
    observer.read(connection, stream)
    inputs, carry = connection.read(stream)
    return sublayers.project(layer, inputs, rope), carry


def leave(
    layer: Layer,
    connections: tuple[Connection, Connection],
    stream: Stream,
    carry: Any,
    context: Any,
    rope: Rope | None,
    observer: Observer,
    sublayers: Sublayers = PLAIN,
) -> tuple[Stream, tuple[Tensor, ...], Routing | None]:
    """Write the output of the attention, and read and write for the MLP.

    Return the stream, what `SelfAttention.project_mlp` makes of the input of the MLP, and the routing.
    """
    for_attention, for_mlp = connections
    output_btd = sublayers.output(layer, context)
    observer.write(for_attention.spec, output_btd)
    stream = for_attention.write(stream, output_btd, carry)
    observer.read(for_mlp, stream)
    inputs, carry = for_mlp.read(stream)
    output_btd, projected, routing = sublayers.transform(layer, inputs, rope)
    observer.write(for_mlp.spec, output_btd)
    return for_mlp.write(stream, output_btd, carry), projected, routing


class Regions(NamedTuple):
    """What a layer does before and after its attention over the sequence.

    The functions take the layer as an argument, so that all layers share their compilation.
    """

    enter: Any = enter
    leave: Any = leave


def _norms(count: int, size: Size, backbone: Backbone) -> nn.Module:
    if count == 1:
        return Norm(size.hidden_size, backbone)
    return nn.ModuleList(Norm(size.hidden_size, backbone) for _ in range(count))


def _normed(norm: nn.Module, inputs: Inputs) -> Inputs:
    norms = norm if isinstance(norm, nn.ModuleList) else (norm,)
    return tuple(one(x) for one, x in zip(norms, inputs, strict=True))
