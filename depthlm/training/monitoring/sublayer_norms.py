"""How large each sublayer's output is, and the gradient there, in a step of training."""

import torch
from torch import Tensor

from depthlm.model import Observer, SublayerSpec
from depthlm.training.monitoring.metrics import finite


class BlockMeter(Observer):
    """Measures one step: root mean squares over all micro-batches and ranks (Attention Residuals, Figure 4 b and c).

    Nothing waits for the device until `row`. depth: layers, loops counted apart.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        # [output and gradient, attention and MLP, layer]
        self.squares = torch.zeros(2, 2, depth, device=device)
        self.shown = torch.zeros(2, depth, device=device)

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        if not output_btd.requires_grad:
            return
        output = mean_square(output_btd.detach())

        # where a layer is recomputed, the second output has no backward pass, and counts no second time
        def add(gradient_btd: Tensor) -> None:
            self.squares[:, int(spec.kind == "mlp"), spec.layer] += torch.stack((output, mean_square(gradient_btd)))
            self.shown[int(spec.kind == "mlp"), spec.layer] += 1

        output_btd.register_hook(add)

    def row(self, loss_scale: float) -> dict[str, list[float | None]]:
        """Of each layer, of the output of its attention and MLP as it is written to the stream: its root mean square,
        and that of the gradient there of the loss, the mean over the tokens of the whole batch; collective.

        loss_scale: the factor that fp16 put on the loss. What is not finite is None.
        """
        ranks = torch.distributed.get_world_size()
        sums = torch.cat((self.squares, self.shown[None]))
        torch.distributed.all_reduce(sums)
        rms = (sums[:2] / sums[2]).sqrt()
        # DeepSpeed averages gradients over the ranks afterwards, and the loss is multiplied by their number for it
        rms[1] /= loss_scale * ranks
        return {
            f"{kind}_{what}": [finite(value) for value in rms[i, j].tolist()]
            for i, what in enumerate(("output", "gradient"))
            for j, kind in enumerate(("attention", "mlp"))
        }


def mean_square(x: Tensor) -> Tensor:
    """The mean of the squares of all numbers, in fp32."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).square() / x.numel()
