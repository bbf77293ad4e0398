from collections.abc import Callable
from typing import Any

import pytest
import torch

from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.decoder import Decoder
from depthlm.model.shape import Backbone, Size

from ..options import option


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
