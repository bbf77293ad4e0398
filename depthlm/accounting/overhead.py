"""What a depth mechanism costs beyond the vanilla decoder of the same size and backbone, as the papers count it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from depthlm.accounting.parameters import count_parameters
from depthlm.model import Decoder
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.connections.residual import Residual

PREFILL_TOKENS = 128 * 1024
BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Overhead:
    """The columns of Table 2 of Depth-Attention (arXiv 2606.05014, appendix B), and the parameters.

    flops_per_token: of one forward pass. io_bytes_per_token: activations read and written, of 16 bits. prefill_bytes:
    held beside the KV cache while 128K tokens are prefilled, of 16 bits. The read before the final norm does not count,
    as in that table.
    """

    parameters: int
    flops_per_token: float
    io_bytes_per_token: float
    prefill_bytes: float


def overhead(model: Decoder) -> Overhead:
    """The overhead of a decoder; works on the meta device."""
    with torch.device("meta"):
        vanilla = Decoder(model.size, model.backbone, Residual, SelfAttention, model.loops)
    attentions = [layer.attention for layer in model.layers]
    reads = list(model.connections)[:-1]
    flops = values = 0.0
    for mine, plain in zip(attentions, vanilla.layers, strict=True):
        flops += model.loops * (_flops(mine) - _flops(plain.attention))
        values += model.loops * mine.io_values()
    for connection in reads:
        flops += _flops(connection)
        values += connection.io_values()
    held = held_states(model) * model.size.hidden_size + model.loops * sum(a.held_values() for a in attentions)
    return Overhead(
        parameters=count_parameters(model)["total"] - count_parameters(vanilla)["total"],
        flops_per_token=flops,
        io_bytes_per_token=BYTES_PER_VALUE * values,
        prefill_bytes=float(PREFILL_TOKENS * BYTES_PER_VALUE * held),
    )


@torch.no_grad()
def held_states(model: Decoder) -> float:
    """The largest stream before any sublayer, in hidden states, beyond the one of a residual decoder.

    Found by making the moves of one token.
    """
    hidden_btd = torch.empty(1, 1, model.size.hidden_size, device=next(model.parameters()).device)
    connections = list(model.connections)[:-1]
    stream, most = connections[0].open(hidden_btd), 0.0
    for connection in connections:
        most = max(most, sum(x.numel() for x in distinct(connection.materialize(stream))) / hidden_btd.numel())
        _, carry = connection.read(stream)
        # a new tensor, as every sublayer's output is
        stream = connection.write(stream, torch.empty_like(hidden_btd), carry)
    return most - 1


def distinct(stream: list[Tensor]) -> list[Tensor]:
    """The tensors of a stream, each once."""
    return list({id(x): x for x in stream}.values())


def _flops(module: torch.nn.Module) -> float:
    linear = sum(2.0 * m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))
    # the length cancels against vanilla's
    return linear + module.forward_flops(1, False)  # type: ignore[operator]
