"""Build a decoder with its initial weights from a configuration."""

import torch

from depthlm.config import Config
from depthlm.config.validate.mechanism import factories
from depthlm.model import Decoder, initialize


def build_model(config: Config, device: str | torch.device = "cpu") -> Decoder:
    """Return the decoder of a configuration: model(tokens[B, T]) -> logits[B, T, V].

    On `meta` it has shapes but no weights. On other devices each parameter is drawn from its own generator, seeded by
    (seed, its name), so that parameters shared by two mechanisms have the same initial values. A mechanism's settings
    are data: no `_target_` inside them is instantiated.
    """
    connection, attention = factories(config.model)
    with torch.device("meta"):
        model = Decoder(config.size, config.backbone, connection, attention, loops=config.model.loops)
    model.kernels = config.kernels
    if torch.device(device).type != "meta":
        draw_weights(config, model, device)
    return model


def draw_weights(config: Config, model: Decoder, device: str | torch.device) -> None:
    """Give a model on meta its initial weights, on this device."""
    model.to_empty(device=device)
    initialize(model, config.seed, config.size.init_std)
