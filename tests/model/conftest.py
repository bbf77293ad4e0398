import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import depthlm
from depthlm.config import Config
from depthlm.locations import CONF
from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.decoder import Decoder
from depthlm.model.parameters import initialize
from depthlm.model.shape import Backbone, Size

from .. import options
from ..options import option

PRESETS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
BACKBONES = ["qwen3", "olmo2", "moda_layers", "lm1b", "qwen3_moe", "kimi_linear"]
# the overrides of a small decoder, for `build`
SHAPE = [
    "size=micro", "size.num_layers=4", "size.hidden_size=32", "size.intermediate_size=48", "size.num_heads=4",
    "size.num_kv_heads=2", "size.head_size=8", "size.vocab_size=320", "data.tokenizer=bytes", "precision=fp32",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_size() -> Callable[..., Size]:
    def make(name: str = "micro", **changes: Any) -> Size:
        return Size(**option("size", name) | changes)

    return make


@pytest.fixture
def make_backbone() -> Callable[..., Backbone]:
    def make(name: str = "qwen3", **changes: Any) -> Backbone:
        return Backbone(**option("backbone", name) | changes)

    return make


@pytest.fixture
def make_decoder(make_size: Callable[..., Size], make_backbone: Callable[..., Backbone]) -> Callable[..., Decoder]:
    """A decoder with initialized weights. std is large, so that every part affects the logits."""

    def make(
        backbone: str = "qwen3",
        size: str = "micro",
        connection: Any = Residual,
        attention: Any = SelfAttention,
        loops: int = 1,
        backbone_changes: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Decoder:
        shape = make_backbone(backbone, **(backbone_changes or {}))
        model = Decoder(make_size(size, **changes), shape, connection, attention, loops)
        initialize(model, seed=0, std=0.1)
        return model

    return make


def configuration(*overrides: str) -> Config:
    """Return the configuration of a small decoder."""
    return options.configuration(*SHAPE, *overrides)


@functools.cache
def decoder(*overrides: str, awake: bool) -> Decoder:
    model = depthlm.build_model(configuration(*overrides))
    initialize(model, seed=0, std=0.1)
    return awaken(model) if awake else model


def awaken(model: Decoder) -> Decoder:
    """Add noise to the parameters of the connections, whose initial values may hide them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.connections.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="session")
def build() -> Callable[..., Decoder]:
    """A small decoder with overrides. awake: whether noise is added to the initial parameters of the connections."""
    return lambda *overrides, awake=True: copy.deepcopy(decoder(*overrides, awake=awake))
