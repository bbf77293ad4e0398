"""The overhead of a depth mechanism over the vanilla decoder of the same size and backbone, as the papers count it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from depthlm.accounting.cost import count_parameters, linear_flops
from depthlm.mechanisms.residual import Residual
from depthlm.model import Decoder
from depthlm.model.attention.self_attention import SelfAttention

PREFILL_TOKENS = 128 * 1024
BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Overhead:
    """The columns of Table 2 of Depth-Attention (arXiv 2606.05014, appendix B), and the parameters.

    flops_per_token: of one forward pass. io_bytes_per_token: activations read and written, in 16 bits. prefill_bytes:
    memory in addition to the KV cache while 128K tokens are prefilled, in 16 bits. As in that table, the read before
    the final norm does not count.
    """

    parameters: int
    flops_per_token: int
    io_bytes_per_token: int
    prefill_bytes: int


def overhead(model: Decoder) -> Overhead:
    """Return the overhead of a decoder; works on the meta device."""
    with torch.device("meta"):
        vanilla = Decoder(model.size, model.backbone, Residual, SelfAttention, model.loops)
    attentions = [layer.attention for layer in model.layers]
    reads = list(model.connections)[:-1]
    flops = values = 0.0
    for attention, vanilla_layer in zip(attentions, vanilla.layers, strict=True):
        # terms in the length cancel in the difference from vanilla
        extra = attention.forward_flops(1, False) - vanilla_layer.attention.forward_flops(1, False)
        flops += model.loops * (linear_flops(attention) - linear_flops(vanilla_layer.attention) + extra)
        values += model.loops * attention.io_values()
    for connection in reads:
        flops += linear_flops(connection) + connection.cost.flops
        values += connection.cost.io_values
    retained = retained_states(model) * model.size.hidden_size + model.loops * sum(a.held_values() for a in attentions)
    return Overhead(
        parameters=count_parameters(model)["total"] - count_parameters(vanilla)["total"],
        flops_per_token=round(flops),
        io_bytes_per_token=round(BYTES_PER_VALUE * values),
        prefill_bytes=round(PREFILL_TOKENS * BYTES_PER_VALUE * retained),
    )


@torch.no_grad()
def retained_states(model: Decoder) -> float:
    """Return the size of the largest state before a sublayer, in hidden states, minus that of a residual decoder.

    It is measured by passing one token through the connections. What is read ahead and a pending write do not count.
    """
    hidden_btd = torch.empty(1, 1, model.size.hidden_size, device=next(model.parameters()).device)
    connections = list(model.connections)[:-1]
    state, largest = connections[0].open(hidden_btd), 0.0
    for connection in connections:
        largest = max(largest, sum(x.numel() for x in retained_tensors(state)) / hidden_btd.numel())
        _, carry = connection.read(state)
        # a new tensor, like the output of every sublayer
        state = connection.write(state, torch.empty_like(hidden_btd), carry)
    return largest - 1


def retained_tensors(state: NamedTuple) -> list[Tensor]:
    """Return the distinct tensors of a state, but not those of its fields `ahead` and `pending`."""
    fields = [value for name, value in state._asdict().items() if name not in ("ahead", "pending")]
    return list({id(x): x for x in tree_leaves(fields) if isinstance(x, Tensor)}.values())
