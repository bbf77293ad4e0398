"""The training engine: DeepSpeed behind one class."""

from depthlm.training.engine.deepspeed import Engine, build_engine
from depthlm.training.engine.experts import draw_spread
from depthlm.training.engine.sharding import autocast, draw_shards, forget_group, undo_sharding, writable

__all__ = [
    "Engine",
    "autocast",
    "build_engine",
    "draw_shards",
    "draw_spread",
    "forget_group",
    "undo_sharding",
    "writable",
]
