"""The pictures of each mechanism, and the forward passes that collect their data."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from depthlm.inspect.mechanisms import COLLECTORS
from depthlm.inspect.picture import Picture
from depthlm.mechanisms.residual import Residual
from depthlm.model import Decoder, Observer, SublayerSpec
from depthlm.model.attention.mixers import attention_class
from depthlm.model.attention.self_attention import AttentionContext, DepthKV, SelfAttention
from depthlm.model.connection import Connection, Stream

WITHOUT_WEIGHTS = (SelfAttention, Residual)


@torch.no_grad()
def collect(
    model: Decoder, windows: Iterable[Tensor], token_names: Sequence[str] = ()
) -> tuple[list[Picture], list[str]]:
    """Return the pictures of a decoder's mechanism over windows of tokens_bt, and messages about missing pictures.

    token_names: the first tokens of the first window as text; if given, pictures show the weights of each of them.
    """
    attention = attention_class(layer.attention for layer in model.layers)
    parts: dict[str, type] = {"attention": attention, "connection": type(model.connections[0])}
    collectors = [COLLECTORS[cls](model) for cls in parts.values() if cls in COLLECTORS]
    for collector in collectors:
        collector.token_names = token_names
    observer = Several(collectors)
    device = next(model.parameters()).device
    for tokens_bt in windows if collectors else ():
        model.hidden(tokens_bt.to(device), observer=observer)
    messages = [
        f"the {part} {cls.__module__}.{cls.__qualname__} has no figure of its own: only depthlm's mechanisms have one"
        for part, cls in parts.items()
        if cls not in COLLECTORS and cls not in WITHOUT_WEIGHTS
    ]
    pictures = [picture for collector in collectors for picture in collector.pictures()]
    if not pictures and not messages:
        settings = "" if type(model.connections[0]) is Residual else ", with these settings,"
        messages.append(f"this mechanism{settings} has no figure of its own")
    return pictures, messages


class Several(Observer):
    """Passes every call on to several observers."""

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
