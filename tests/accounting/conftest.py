from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.connections.residual import Residual
from depthlm.model.decoder import Decoder
from depthlm.model.shape import Backbone, Size

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def vanilla() -> Callable[..., Decoder]:
    """Build a vanilla decoder of a size and backbone of conf/, by default on the meta device."""
    torch.set_num_threads(1)

    def make(size: str, backbone: str, device: str = "meta", **changes: int) -> Decoder:
        settings = yaml.safe_load((CONF / "size" / f"{size}.yaml").read_text()) | changes
        with torch.device(device):
            shape = Backbone(**yaml.safe_load((CONF / "backbone" / f"{backbone}.yaml").read_text()))
            return Decoder(Size(**settings), shape, Residual, SelfAttention)

    return make
