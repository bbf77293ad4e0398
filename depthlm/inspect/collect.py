"""The pictures of a mechanism, from the figures that its connections and attentions return in forward passes."""

from collections.abc import Iterable

import torch
from torch import Tensor

from depthlm.inspect.grids import AttentionMaps, Grids, Matrices
from depthlm.inspect.picture import FigureOverDepth, Picture, Place
from depthlm.model import Decoder, Observer, SublayerSpec
from depthlm.model.attention import attention_positions
from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV, SelfAttention
from depthlm.model.connection import Connection, State
from depthlm.model.figures import Figure


@torch.no_grad()
def collect(model: Decoder, windows: Iterable[Tensor]) -> tuple[list[Picture], list[str]]:
    """Return the pictures of a decoder's mechanism over windows of tokens_bt, and a message if there are none."""
    collector = Collector(model)
    device = next(model.parameters()).device
    for tokens_bt in windows:
        model.hidden(tokens_bt.to(device), observer=collector)
    pictures = [picture for figure in collector.figures.values() for picture in figure.pictures()]
    return pictures, [] if pictures else ["this mechanism, with these settings, has no figure of its own"]


class Collector(Observer):
    """Collects the figures of all connections and attentions, by the mechanism's module and the figure's name."""

    def __init__(self, model: Decoder) -> None:
        self.depth = model.loops * model.size.num_layers
        self.attending = attention_positions([layer.attention for layer in model.layers], model.loops)
        self.figures: dict[tuple[str, str], FigureOverDepth] = {}

    def open(self, embedding_btd: Tensor) -> None:
        self.tokens = embedding_btd[..., 0].numel()

    def read(self, connection: Connection, state: State) -> None:
        spec = connection.spec
        for figure in connection.figures(state):
            self.add(connection, figure, Place(spec.kind, spec.layer))
        if spec.kind == "final":
            for over_depth in self.figures.values():
                if isinstance(over_depth, Matrices):
                    over_depth.end_pass(self.tokens)

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        past: AttentionContext,
    ) -> None:
        for figure in attention.figures(projected, depth, past):
            self.add(attention, figure, Place("", spec.layer))

    def add(self, module: Connection | SelfAttention, figure: Figure, place: Place) -> None:
        mechanism = type(module).__module__.rpartition(".")[2]
        axes, shape = figure.axes, tuple(figure.values.shape)
        if len(axes) != len(shape):
            raise ValueError(f"{type(module).__qualname__}: figure {figure.name} of shape {shape} has axes {axes}")
        if "layer" in axes:
            places = figure.places or range(shape[axes.index("layer")])
            figure = figure._replace(places=[self.attending[position] for position in places])
        key = mechanism, figure.name
        if key not in self.figures:
            over_depth = AttentionMaps if "query" in axes else Matrices if len(set(axes)) < len(axes) else Grids
            self.figures[key] = over_depth(mechanism, figure, self.depth)
        self.figures[key].add(figure, place, self.tokens)
