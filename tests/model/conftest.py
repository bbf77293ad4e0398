from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.connections.residual import Residual
from depthlm.model.decoder import Decoder
from depthlm.model.initialization import initialize
from depthlm.model.shape import Backbone, Size

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_size() -> Callable[..., Size]:
    def make(name: str = "micro", **changes: Any) -> Size:
        return Size(**(yaml.safe_load((CONF / "size" / f"{name}.yaml").read_text()) | changes))

    return make


@pytest.fixture
def make_backbone() -> Callable[..., Backbone]:
    def make(name: str = "qwen3", **changes: Any) -> Backbone:
        return Backbone(**(yaml.safe_load((CONF / "backbone" / f"{name}.yaml").read_text()) | changes))

    return make


@pytest.fixture
def make_decoder(make_size: Callable[..., Size], make_backbone: Callable[..., Backbone]) -> Callable[..., Decoder]:
    """A decoder with weights; std is large, so that a test sees every part of it."""

    def make(
        backbone: str = "qwen3",
        size: str = "micro",
        connection: Any = Residual,
        attention: Any = SelfAttention,
        loops: int = 1,
        tie: bool | None = None,
        **changes: Any,
    ) -> Decoder:
        shape = make_backbone(backbone) if tie is None else make_backbone(backbone, tie_embeddings=tie)
        model = Decoder(make_size(size, **changes), shape, connection, attention, loops)
        initialize(model, seed=0, std=0.1)
        return model

    return make
