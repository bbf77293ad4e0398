"""Sublayer norms: the RMS of each sublayer's output, and of the gradient there, in a training step."""

import torch
from torch import Tensor

from depthlm.model import Observer, SublayerSpec
from depthlm.runs.validation_losses import finite


class BlockMeter(Observer):
    """Measures one step: root mean squares over all micro-batches and ranks (Attention Residuals, Figure 5 b and c).

    The host does not synchronize with the device before `row`. depth: the number of layers times loops.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        # [output and gradient, attention and MLP, layer]
        self.squares = torch.zeros(2, 2, depth, device=device)
        self.shown = torch.zeros(2, depth, device=device)

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        if not output_btd.requires_grad:
            return
        output = mean_square(output_btd.detach())

        # activation checkpointing computes an output twice; the hook counts only the one with a backward pass
        def accumulate(gradient_btd: Tensor) -> None:
            self.squares[:, int(spec.kind == "mlp"), spec.layer] += torch.stack((output, mean_square(gradient_btd)))
            self.shown[int(spec.kind == "mlp"), spec.layer] += 1

        output_btd.register_hook(accumulate)

    def row(self, loss_scale: float) -> dict[str, list[float | None]]:
        """Return for each layer the RMS of the attention and MLP outputs as written to the residual stream, and the RMS
        of the gradient of the loss (the mean over the tokens of the global batch) there; collective.

        loss_scale: the fp16 loss scale of the step. Non-finite values are None.
        """
        ranks = torch.distributed.get_world_size()
        sums = torch.cat((self.squares, self.shown[None]))
        torch.distributed.all_reduce(sums)
        rms = (sums[:2] / sums[2]).sqrt()
        # the loss was multiplied by the number of ranks, since DeepSpeed averages gradients over the ranks afterwards
        rms[1] /= loss_scale * ranks
        return {
            f"{sublayer}_{quantity}": [finite(value) for value in rms[i, j].tolist()]
            for i, quantity in enumerate(("output", "gradient"))
            for j, sublayer in enumerate(("attention", "mlp"))
        }


def mean_square(x: Tensor) -> Tensor:
    """Return the mean of the squares of all elements, in fp32."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).square() / x.numel()
