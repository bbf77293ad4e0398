"""Meters of a training step: sublayer norms, and how routers distribute tokens over experts.

Shapes: l layers with experts, each loop again; e experts.
"""

from pathlib import Path

import torch
from torch import Tensor

from depthlm.model import Decoder, Observer, SublayerSpec
from depthlm.model.experts import Routing, balance
from depthlm.runs.records import finite
from depthlm.training.engine import Engine
from depthlm.training.monitoring.metrics import MetricsFile


class SublayerNormMeter(Observer):
    """Measures one step: root mean squares over all micro-batches and ranks (Attention Residuals, Figure 5 b and c).

    The host does not synchronize with the device before `row`. depth: the number of layers times loops.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        # [output and gradient, attention and MLP, layer]
        self.squares = torch.zeros(2, 2, depth, device=device)
        self.counts = torch.zeros(2, depth, device=device)

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        if not output_btd.requires_grad:
            return
        output = mean_square(output_btd.detach())

        # activation checkpointing computes an output twice; the hook counts only the one with a backward pass
        def accumulate(gradient_btd: Tensor) -> None:
            self.squares[:, int(spec.kind == "mlp"), spec.layer] += torch.stack((output, mean_square(gradient_btd)))
            self.counts[int(spec.kind == "mlp"), spec.layer] += 1

        output_btd.register_hook(accumulate)

    def row(self, loss_scale: float) -> dict[str, list[float | None]]:
        """Return for each layer the RMS of the attention and MLP outputs as written to the residual stream, and the RMS
        of the gradient of the loss (the mean over the tokens of the global batch) there; collective.

        loss_scale: the fp16 loss scale of the step. Non-finite values are None.
        """
        ranks = torch.distributed.get_world_size()
        sums = torch.cat((self.squares, self.counts[None]))
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


def meter_of(engine: Engine, path: Path | None, step: int) -> "RoutingMeter | None":
    """Return the meter of a model with experts, otherwise None.

    path: of the file for its rows, without those after `step`; None on ranks that write none.
    """
    if not engine.model.mixtures():
        return None
    return RoutingMeter(engine.model, engine.device, MetricsFile(path, step))


class RoutingMeter:
    """Adds up the routing of the micro-batches of a step, and balances the experts after it."""

    def __init__(self, model: Decoder, device: torch.device, file: MetricsFile) -> None:
        """file: gets a row for each logged step."""
        self.mixtures, self.file = model.mixtures(), file
        layers, experts = model.loops * len(self.mixtures), model.size.num_experts
        # a row is the load of each expert, then balance, z and entropy
        self._sums = torch.zeros(layers, experts + 3, device=device)
        self._batches = 0

    def begin(self) -> None:
        """Forget the last step."""
        self._sums.zero_()
        self._batches = 0

    def add(self, routing: Routing) -> None:
        """Add the routing of a micro-batch of this rank."""
        others = torch.stack((routing.balance, routing.z, routing.entropy), 1)
        self._sums += torch.cat((routing.load_e, others), 1).detach()
        self._batches += 1

    def end(self, applied: bool) -> None:
        """Add the sums of all ranks and, if the update was applied, change the biases of the routers; collective."""
        torch.distributed.all_reduce(self._sums)
        self._sums[:, -3:] /= self._batches * torch.distributed.get_world_size()
        if applied:
            balance(self.mixtures, self._sums[:, :-3])

    def metrics(self) -> dict[str, float]:
        """Return the means over the layers, and the largest load of an expert, as a multiple of the mean load."""
        load_le, means = self._sums[:, :-3], self._sums[:, -3:].mean(0).tolist()
        largest = (load_le / load_le.mean(1, keepdim=True)).max().item()
        return {
            "router/largest_load": largest,
            **dict(zip(("router/balance_loss", "router/z", "router/entropy"), means, strict=True)),
        }

    def write(self, step: int) -> None:
        """Write the share of each expert in the load, the entropy and the biases, layer by layer."""
        load_le = self._sums[:, :-3]
        biases = [mixture.router.bias_e for mixture in self.mixtures]
        row = {
            "step": step,
            "load": (load_le / load_le.sum(1, keepdim=True)).tolist(),
            "entropy": self._sums[:, -1].tolist(),
            "bias": [bias_e.tolist() for bias_e in biases if bias_e is not None],
        }
        self.file.write(row)
