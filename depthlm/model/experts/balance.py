"""Balance the load of experts without an auxiliary loss.

Shapes: e experts, l layers of the forward pass: each loop counts again.
"""

import torch
from torch import Tensor

from depthlm.model.experts.mixture import Mixture


@torch.no_grad()
def balance(mixtures: list[Mixture], load_le: Tensor) -> None:
    """Raise the bias of each expert with less than the mean load, and lower that of the others, by one step.

    DeepSeek-V3 (arXiv 2412.19437), section 2.1.2. load_le: how many tokens of the global batch each expert has got.
    """
    for number, mixture in enumerate(mixtures):
        router = mixture.router
        if router.bias_e is not None:
            load_e = load_le[number :: len(mixtures)].sum(0)
            router.bias_e += router.backbone.router_bias_rate * (load_e.mean() - load_e).sign().to(router.bias_e.dtype)
