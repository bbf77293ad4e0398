import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import depthlm
from depthlm.config import Config, compose
from depthlm.config.resolve import with_derived
from depthlm.config.saved import config_text
from depthlm.data import bytes_tokenizer
from depthlm.files import digest
from depthlm.model import Decoder, initialize
from depthlm.run_directory import MANIFEST, RunDirectory
from depthlm.runs.checkpoints import WEIGHTS
from depthlm.runs.manifest import seal

from ..model.conftest import SHAPE
from ..options import configuration

MakeRun = Callable[..., Path]


def awaken(model: Decoder, config: Config) -> Decoder:
    """Move every parameter away from its initial value, far enough to affect the tests."""
    initialize(model, seed=0, std=0.1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "connections" in name or "norm" in name or parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@cache
def composed(overrides: tuple[str, ...], config_dir: str | None) -> Config:
    """Return the configuration of a small decoder with these overrides, composed once for all tests."""
    settings = [*SHAPE, "data=local", "training.sequence_length=32", "training.max_steps=1", *overrides]
    if config_dir is not None:
        return compose(settings, config_dir, here=False)
    return with_derived(configuration(*settings), set(), settings)


def write_run(directory: Path, *overrides: str, config_dir: str | None = None) -> Path:
    """Write a run directory with one checkpoint of a small decoder, as training would, without training."""
    config = dataclasses.replace(composed(overrides, config_dir), output_dir=str(directory))
    checkpoint = RunDirectory(directory).checkpoint(1)
    checkpoint.mkdir(parents=True)
    model = awaken(depthlm.build_model(config), config)
    save_file(model.state_dict(), checkpoint / WEIGHTS)
    (directory / "config.yaml").write_text(config_text(config))
    bytes_tokenizer().save(directory)
    manifest = seal(
        {
            **{"step": 1, "world_size": 1, "stage": 0, "experts": 1, "corpus": "", "tokens": 77},
            "config": dataclasses.asdict(config),
            "files": {WEIGHTS: digest(checkpoint / WEIGHTS)},
        }
    )
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    return directory


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run directory for these overrides."""

    def make(*overrides: str, name: str = "run", **composed: Any) -> Path:
        return write_run(tmp_path / name, *overrides, **composed)

    return make
