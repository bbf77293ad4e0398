"""How the routers of a step have distributed its tokens: over all micro-batches and ranks.

Shapes: l layers with experts, each loop again; e experts.
"""

from pathlib import Path

import torch

from depthlm.model import Decoder
from depthlm.model.experts import Routing, balance
from depthlm.training.engine import Engine
from depthlm.training.monitoring.metrics import MetricsFile


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
