"""Which mechanisms have pictures, and how a decoder is shown tokens to make them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from depthlm.inspect.depth_attention import DepthAttentionWeights
from depthlm.inspect.hyper_connections import MixingMaps
from depthlm.inspect.learned import Averages, LaurelWeights
from depthlm.inspect.moda import DepthProbabilities
from depthlm.inspect.picture import Collector, Picture
from depthlm.inspect.reads import AttentionResidualWeights, StackWeights
from depthlm.model import Decoder, Observer, SublayerSpec
from depthlm.model.attention.depth_attention import DepthAttention
from depthlm.model.attention.moda import Moda
from depthlm.model.attention.self_attention import AttentionContext, DepthKV, SelfAttention
from depthlm.model.connections.attention_residuals import AttentionResiduals, AttentionResidualsRecency
from depthlm.model.connections.connection import Connection, Stream
from depthlm.model.connections.deep_cross_attention import GRN
from depthlm.model.connections.denseformer import DenseFormer
from depthlm.model.connections.hyper_connections import HyperConnections, ManifoldHyperConnections
from depthlm.model.connections.laurel import Laurel
from depthlm.model.connections.residual import Residual

# of the class itself: one that inherits from it may compute something else
COLLECTORS: dict[type, type[Collector]] = {
    DepthAttention: DepthAttentionWeights,
    Moda: DepthProbabilities,
    AttentionResiduals: AttentionResidualWeights,
    AttentionResidualsRecency: AttentionResidualWeights,
    GRN: StackWeights,
    DenseFormer: Averages,
    HyperConnections: MixingMaps,
    ManifoldHyperConnections: MixingMaps,
    Laurel: LaurelWeights,
}
WITHOUT_WEIGHTS = (SelfAttention, Residual)


@torch.no_grad()
def collect(model: Decoder, windows: Iterable[Tensor]) -> tuple[list[Picture], list[str]]:
    """The pictures of a decoder's mechanism over windows, tokens_bt each; and, in words, what has no picture."""
    parts = {"attention": type(model.layers[0].attention), "connection": type(model.connections[0])}
    collectors = [COLLECTORS[kind](model) for kind in parts.values() if kind in COLLECTORS]
    observer = Several(collectors)
    device = next(model.parameters()).device
    for tokens_bt in windows if collectors else ():
        model.hidden(tokens_bt.to(device), observer=observer)
    unknown = [
        f"there is no picture of the {part} {kind.__module__}.{kind.__qualname__}: only depthlm's own have one"
        for part, kind in parts.items()
        if kind not in COLLECTORS and kind not in WITHOUT_WEIGHTS
    ]
    pictures = [picture for collector in collectors for picture in collector.pictures()]
    if not pictures and not unknown:
        settings = "" if type(model.connections[0]) is Residual else ", with these settings,"
        unknown.append(f"this mechanism{settings} has no weights over depth to draw")
    return pictures, unknown


class Several(Observer):
    """Shows each of several observers the same."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self.observers = list(observers)

    def read(self, connection: Connection, stream: Stream) -> None:
        for observer in self.observers:
            observer.read(connection, stream)

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        past: AttentionContext,
    ) -> None:
        for observer in self.observers:
            observer.attend(spec, attention, projected, depth, past)
