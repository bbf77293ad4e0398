"""Decoders and their depth mechanisms, in plain PyTorch, independent of configuration and training."""

from typing import TYPE_CHECKING

from depthlm.lazy import lazy_attributes
from depthlm.model.shape import Backbone, Size, SublayerSpec

if TYPE_CHECKING:
    from depthlm.model.compilation import compile_sublayers
    from depthlm.model.connection import Connection
    from depthlm.model.decoder import Decoder, Loss
    from depthlm.model.layer import Observer
    from depthlm.model.parameters import initialize, optimizer_groups

__all__ = [
    "Backbone",
    "Connection",
    "Decoder",
    "Loss",
    "Observer",
    "Size",
    "SublayerSpec",
    "compile_sublayers",
    "initialize",
    "optimizer_groups",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Connection": "connection",
        "Decoder": "decoder",
        "Loss": "decoder",
        "Observer": "layer",
        "compile_sublayers": "compilation",
        "initialize": "parameters",
        "optimizer_groups": "parameters",
    },
)
