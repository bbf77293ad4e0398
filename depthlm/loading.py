"""A trained run, back from its directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors.torch import load_file

from depthlm.build import build_model
from depthlm.config import Config
from depthlm.config.mechanism import check_target
from depthlm.config.sources import type_sources
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.model import Decoder
from depthlm.training.checkpoints import WEIGHTS, newest_checkpoint
from depthlm.training.run_directory import saved_config


def load(run: str | Path, device: str | torch.device = "cpu", trust: Sequence[str] = ()) -> tuple[Decoder, Config]:
    """The model of a run directory with the weights of its newest whole checkpoint, in evaluation mode, and its config.

    The configuration is read as data: it may build classes of depthlm, and of the modules named in `trust`, alone.
    Raises UserError for a directory without a run or checkpoint, or a mechanism from elsewhere.
    """
    model, config, _ = load_checkpoint(run, device, trust)
    return model, config


def load_checkpoint(
    run: str | Path, device: str | torch.device = "cpu", trust: Sequence[str] = ()
) -> tuple[Decoder, Config, dict[str, Any]]:
    """As `load`, with the manifest of the checkpoint that the weights are of."""
    directory = Path(run)
    config = load_config(directory)
    for part, settings in (("connection", config.model.connection), ("attention", config.model.attention)):
        module = str(settings.get("_target_")).rpartition(".")[0]
        if not any(module == name or module.startswith(f"{name}.") for name in ("depthlm", *trust)):
            raise UserError(f"{directory}: model.{part} is {module}'s; name that module in trust=[...] to build it")
        if errors := check_target(f"model.{part}", settings):
            raise UserError(f"{directory}: {'; '.join(errors)}")
    found = newest_checkpoint(directory)
    if found is None:
        raise UserError(f"{directory}: no whole checkpoint in it; train it first, or name another run")
    path, manifest = found
    model = build_model(config, "meta").to_empty(device=device)
    weights = load_file(path / WEIGHTS, device=str(device))
    model.load_state_dict(weights)
    if model.kernels == "triton":
        # what a run must have is no demand on where it is used
        model.kernels = "auto"
    if config.data.document_mask:
        model.end_of_text = Tokenizer.load(directory).end_of_text
    return model.eval(), config, manifest


def load_config(directory: Path) -> Config:
    """The resolved configuration of a run directory. Raises UserError where there is none."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise UserError(f"{directory}: no run in it (config.yaml is missing)")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), saved_config(directory)))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: not the configuration of a run ({error})") from None
    assert isinstance(config, Config)
    type_sources(config.data)
    return config
