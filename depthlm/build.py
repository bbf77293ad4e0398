"""Build a decoder from a configuration, with its initial weights or with those of a run."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from depthlm.config import Config
from depthlm.config.classes import check_target, check_trusted, code_digests, factories, targets
from depthlm.config.saved import compare, load_config
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.model import Decoder, initialize
from depthlm.model.shape import Size, SublayerSpec
from depthlm.optimizers.parametrization import parametrize
from depthlm.run_directory import RunDirectory
from depthlm.runs.checkpoints import WEIGHTS, newest_checkpoint, retrain
from depthlm.runs.manifest import Manifest

log = logging.getLogger(__name__)


def build_model(config: Config, device: str | torch.device = "cpu") -> Decoder:
    """Return the decoder of a configuration: model(tokens[B, T]) -> logits[B, T, V].

    On `meta` it has shapes but no weights. On other devices each parameter is drawn from its own generator, seeded by
    (seed, its name), so that parameters shared by two mechanisms have the same initial values. A mechanism's settings
    are data: no `_target_` inside them is instantiated.

    Raises ValueError if the mechanism refuses the parametrization or its base size.
    """
    connection, attention = factories(config.model)
    with torch.device("meta"):
        model = Decoder(config.size, config.backbone, connection, attention, config.model.loops)
    name, base = config.parametrization.name, config.parametrization.base_size
    if name != "standard":
        assert isinstance(base, Size)
        same_depth = replace(base, num_layers=config.size.num_layers)
        with torch.device("meta"):
            narrow = Decoder(same_depth, config.backbone, connection, attention, config.model.loops)
            spec = SublayerSpec(0, "attention", config.model.loops * base.num_layers)
            base_connection = connection(spec, base, config.backbone)
        parametrize(model, narrow, name, base_connection)
    model.kernels = config.kernels
    model.fp32_residual = config.precision.fp32_residual
    if torch.device(device).type != "meta":
        draw_weights(config, model, device)
    return model


def draw_weights(config: Config, model: Decoder, device: str | torch.device) -> None:
    """Give a model on meta its initial weights, on this device."""
    model.to_empty(device=device)
    initialize(model, config.seed, config.size.init_std, backbone=config.backbone)


def load(run: str | Path, device: str | torch.device = "cpu", trust: Sequence[str] = ()) -> tuple[Decoder, Config]:
    """Return the model of a run directory, with the weights of its newest valid checkpoint, and its configuration.

    The model is in evaluation mode. The configuration is read as data and may only build classes of depthlm and of the
    modules named in `trust`. Logs a warning if the code of such a class is not that of the training. Raises UserError
    for a directory without a run or checkpoint, or a mechanism from another module.
    """
    model, config, _ = load_checkpoint(run, device, trust)
    return model, config


def load_checkpoint(
    run: str | Path, device: str | torch.device = "cpu", trust: Sequence[str] = ()
) -> tuple[Decoder, Config, Manifest]:
    """Like `load`, and also return the manifest of the loaded checkpoint."""
    directory = Path(run)
    config = load_config(directory)
    mechanism = targets(config.model)
    check_trusted(mechanism, trust, str(directory))
    for part, settings in (("connection", config.model.connection), ("attention", config.model.attention)):
        if errors := check_target(f"model.{part}", settings):
            raise UserError(f"{directory}: {'; '.join(errors)}")
    for name, words in compare({"code": config.code}, {"code": code_digests(mechanism.values())}).items():
        log.warning("%s: %s has changed since the training: %s", directory, name, words)
    model, manifest = _load_newest(config, directory, device)
    if model.kernels == "triton":
        # a requirement of training should not restrict where the model is used
        model.kernels = "auto"
    if config.data.document_mask:
        model.mask_documents(config.data.document_mask, Tokenizer.load(directory).end_of_text)
    return model, config, manifest


def _load_newest(config: Config, directory: Path, device: str | torch.device) -> tuple[Decoder, Manifest]:
    while (checkpoint := newest_checkpoint(directory)) is not None:
        path, manifest = checkpoint
        try:
            return with_weights(config, path, device), manifest
        except (OSError, SafetensorError) as error:
            # a process that trains removes old checkpoints
            if path.exists():
                raise UserError(f"{path}: {WEIGHTS} cannot be read ({error})") from None
    finished = RunDirectory(directory).summary.exists()
    remedy = retrain(directory) if finished else "train it first, or name another run"
    raise UserError(f"{directory}: no checkpoint in it; {remedy}")


def with_weights(config: Config, checkpoint: Path, device: str | torch.device) -> Decoder:
    """Return the decoder of a configuration in evaluation mode, with the weights of a checkpoint's folder."""
    model = build_model(config, "meta").to_empty(device=device)
    model.load_state_dict(load_file(checkpoint / WEIGHTS, device=str(device)))
    return model.eval()
