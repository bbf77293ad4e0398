"""Decoders and their depth mechanisms: plain PyTorch, which knows nothing of configuration or training."""

from depthlm.model.connections.connection import Connection
from depthlm.model.decoder import Decoder, Loss, compile_sublayers
from depthlm.model.initialization import initialize
from depthlm.model.observer import Observer
from depthlm.model.parameters import optimizer_groups
from depthlm.model.place import Place
from depthlm.model.shape import Backbone, Size

__all__ = [
    "Backbone",
    "Connection",
    "Decoder",
    "Loss",
    "Observer",
    "Place",
    "Size",
    "compile_sublayers",
    "initialize",
    "optimizer_groups",
]
