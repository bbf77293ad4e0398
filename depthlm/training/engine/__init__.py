"""The training engine: one interface, and DeepSpeed behind it."""

from depthlm.training.engine.deepspeed import build_engine
from depthlm.training.engine.interface import Engine
from depthlm.training.engine.settings import autocast
from depthlm.training.engine.sharding import draw_shards, undo_sharding, writable
from depthlm.training.engine.spreading import draw_spread

__all__ = [
    "Engine",
    "autocast",
    "build_engine",
    "draw_shards",
    "draw_spread",
    "undo_sharding",
    "writable",
]
