"""From a configuration to a decoder with its starting weights."""

import torch

from depthlm.config import Config
from depthlm.config.validate.mechanism import factories
from depthlm.model import Decoder, initialize


def build_model(config: Config, device: str | torch.device = "cpu") -> Decoder:
    """The decoder of a configuration: model(tokens[B, T]) -> logits[B, T, V].

    On `meta` it has shapes but no weights. Elsewhere each parameter is drawn from its own generator, seeded by
    (seed, its name), so that what two mechanisms share starts the same. A mechanism's settings are data: no `_target_`
    inside them is built.
    """
    connection, attention = factories(config.model)
    with torch.device("meta"):
        model = Decoder(config.size, config.backbone, connection, attention, loops=config.model.loops)
    model.kernels = config.kernels
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialize(model, config.seed, config.size.init_std)
    return model
