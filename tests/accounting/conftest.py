from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from depthlm.config import Config, compose_anywhere
from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.decoder import Decoder
from depthlm.model.shape import Backbone, Size

from ..options import option


@cache
def composed(*overrides: str) -> Config:
    """Return the configuration of these overrides, composed once for all tests, which do not change it."""
    return compose_anywhere([*overrides])


def configuration(*overrides: str) -> Config:
    """Return the configuration of these overrides. Composing takes long, so it is not repeated for every size and
    backbone."""
    given = dict(override.split("=", 1) for override in overrides)
    config = composed(*(override for override in overrides if override.split("=")[0] not in ("size", "backbone")))
    size, backbone = option("size", given.get("size", "micro")), option("backbone", given.get("backbone", "qwen3"))
    changed = {key.removeprefix("size."): int(value) for key, value in given.items() if key.startswith("size.")}
    # a size also sets the length of the sequences
    return replace(
        config,
        size=replace(config.size, **size | changed),
        backbone=replace(config.backbone, **backbone),
        training=replace(config.training, sequence_length=size["sequence_length"]),
    )


@pytest.fixture
def vanilla() -> Callable[..., Decoder]:
    """Build a vanilla decoder of a size and backbone of conf/, by default on the meta device."""
    torch.set_num_threads(1)

    def make(
        size: str, backbone: str, device: str = "meta", backbone_changes: dict[str, Any] | None = None, **changes: int
    ) -> Decoder:
        with torch.device(device):
            shape = Backbone(**option("backbone", backbone) | (backbone_changes or {}))
            return Decoder(Size(**option("size", size) | changes), shape, Residual, SelfAttention)

    return make
