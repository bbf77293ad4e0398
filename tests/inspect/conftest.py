from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import depthlm
from depthlm.config import Config
from depthlm.inspect import collect
from depthlm.model import Backbone, Decoder, Size, initialize
from depthlm.training import train

from ..conftest import short_run
from ..model.literal.classes import CLASSES
from ..model.literal.decoder import Mechanism
from ..options import configuration
from ..pictures import quick_pictures, rendered

__all__ = ["quick_pictures", "rendered"]

# a small decoder with biases and without QK-norm, so that a bias alone can set a query or a key
SHAPE = [
    "size=micro", "backbone=moda_layers", "size.num_layers=4", "size.hidden_size=16", "size.intermediate_size=24",
    "size.num_heads=4", "size.num_kv_heads=2", "size.head_size=8", "size.vocab_size=320", "data.tokenizer=bytes",
    "precision=fp32",
]  # fmt: skip

TOKENS = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(0))

Arrays = dict[str, np.ndarray[Any, Any]]


def composed(*overrides: str) -> Config:
    """Return the configuration of a small decoder with these overrides."""
    return configuration(*SHAPE, *overrides)


def noisy_decoder(connection: Mechanism, attention: Mechanism = ("self_attention", {}), layers: int = 2) -> Decoder:
    """Return a decoder in float64 with noise on all parameters, of mechanisms that the formulas have too."""
    size = Size(
        hidden_size=12, intermediate_size=20, num_layers=layers, num_heads=2, num_kv_heads=1, head_size=6,
        vocab_size=17,
    )  # fmt: skip
    model = Decoder(size, Backbone(), *(partial(CLASSES[name], **more) for name, more in (connection, attention)))
    initialize(model, seed=0, std=0.3)
    model.double().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def build() -> Callable[..., Decoder]:
    """A small decoder with overrides, and weights large enough to affect the pictures."""

    def make(*overrides: str) -> Decoder:
        model = depthlm.build_model(composed(*overrides))
        initialize(model, seed=0, std=0.2)
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture
def arrays() -> Callable[..., Arrays]:
    """The arrays of all pictures of a decoder. The fixture also draws the pictures."""

    def find(model: Decoder, *windows: torch.Tensor) -> Arrays:
        pictures, _ = collect(model, windows or (TOKENS[:2], TOKENS[2:]))
        for picture in pictures:
            picture.draw()
        return {name: array for picture in pictures for name, array in picture.arrays.items()}

    return find


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path, token_folder: Path) -> Path:
    """The directory of a run that combines two mechanisms."""
    folder = tmp_path_factory.mktemp("runs") / "pair"
    mechanisms = "model/connection=attention_residuals", "model/attention=moda"
    settings = short_run(corpus_folder, token_folder, folder, *mechanisms, "training.max_steps=2")
    assert train(depthlm.compose(settings)) == 0
    return folder
