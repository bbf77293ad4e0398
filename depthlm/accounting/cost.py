"""Parameters by part of the model, and floating-point operations per token, from each module's formula.

A multiplication and an addition count as two operations. Only matrix products and attention count. Norms, activations,
positions and embedding lookups do not, as in `torch.utils.flop_counter`, which the tests compare with.
"""

from dataclasses import dataclass

from torch import nn

from depthlm.config import Config, run_steps
from depthlm.machine.environment import PEAK_TFLOPS
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.connection import Connection
from depthlm.model.decoder import Decoder
from depthlm.model.experts import Mixture
from depthlm.model.layer import Layer
from depthlm.model.layers import Embedding, Head, Norm
from depthlm.model.parameters import OwnedParameter, owned_parameters
from depthlm.runs.progress import hours_text

# what GPU hours assume that are not measured: the FLOP/s of an H100 SXM, and the share of them that is used, which is
# that of each mechanism on an H200 (benchmarks/README.md): size=1.5b, compiled, with CUDA graphs
ASSUMED_FLOPS = PEAK_TFLOPS["NVIDIA H100 80GB HBM3"] * 1e12
MEASURED_MFU = {
    "vanilla": 0.399,
    "depth_attention": 0.383,
    "attention_residuals": 0.307,
    "moda": 0.336,
    "denseformer": 0.251,
    "mhc": 0.235,
    "dca": 0.181,
}
# steps of a run beyond which its batch is probably too small: published runs take at most a million
LONG_RUN = 1_000_000
# of values in 16 bits
BYTES_PER_VALUE = 2
PARTS = ("embedding", "attention", "mlp", "norms", "head", "connection")


@dataclass(frozen=True)
class Flops:
    """FLOPs per token. attention, mlp, head and connection: of one forward pass."""

    attention: float
    mlp: float
    head: float
    connection: float

    @property
    def forward(self) -> float:
        return self.attention + self.mlp + self.head + self.connection

    @property
    def training(self) -> float:
        """Forward and backward: three times forward (arXiv 2001.08361). Recomputation does not count, as in MFU."""
        return 3 * self.forward


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each part, and the "total"; works on the meta device.

    With experts, also return "activated", which excludes the experts to which a token is not sent.

    norms: the norms of the layers, of q and k, and the final norm. attention: including the mechanism's parameters.
    connection: all parameters of the connections, norms included. head: 0 if tied, since it counts as embedding.
    """
    counts = dict.fromkeys(PARTS, 0)
    for owned in owned_parameters(model):
        counts[_part(owned)] += owned.parameter.numel()
    total, idle = sum(counts.values()), 0
    for mixture in (module for module in model.modules() if isinstance(module, Mixture)):
        experts = sum(parameter.numel() for parameter in mixture.experts.parameters())
        idle += experts - experts * mixture.router.top_k // mixture.router.weight.shape[0]
    return counts | {"total": total} | ({"activated": total - idle} if idle else {})


def cache_bytes_per_token(model: Decoder) -> int:
    """Return the bytes of the KV cache in 16 bits per token; works on the meta device."""
    mixers = [layer.attention for layer in model.layers if isinstance(layer.attention, SelfAttention)]
    return round(BYTES_PER_VALUE * model.loops * sum(mixer.cache_values() for mixer in mixers))


def flops_per_token(model: Decoder, sequence_length: float, causal: bool = True) -> Flops:
    """Return the FLOPs per token for sequences of this length; works on the meta device.

    If attention stays inside documents, pass `Batches.document_length`.

    A linear layer of n weights takes 2n. Attention takes 4 H e T, halved if causal, where H is the number of heads, e
    their size and T the sequence length. In a mixture of experts, only the experts of a token count. What an attention
    computes outside of its `nn.Linear` children is in `SelfAttention.forward_flops`; for a connection, it is in
    `Connection.cost`.

    causal: False also counts the scores that the mask discards.
    """
    of_layers = [layer_flops(layer, sequence_length, causal) for layer in model.layers]
    attention, mlp = map(sum, zip(*of_layers, strict=True))
    connection = sum(map(connection_flops, model.connections))
    head = 2.0 * model.size.hidden_size * model.size.vocab_size
    return Flops(attention * model.loops, mlp * model.loops, head, connection)


def layer_flops(layer: Layer, sequence_length: float, causal: bool = True) -> tuple[float, float]:
    """Return the forward FLOPs per token of the attention and the MLP of a layer."""
    attention = linear_flops(layer.attention) + layer.attention.forward_flops(sequence_length, causal)
    return attention, linear_flops(layer.mlp) + (layer.mlp.forward_flops() if isinstance(layer.mlp, Mixture) else 0.0)


def connection_flops(connection: Connection) -> float:
    """Return the forward FLOPs per token of a connection."""
    return linear_flops(connection) + connection.cost.flops


def linear_flops(module: nn.Module) -> float:
    """Return the FLOPs per token of the linear layers in a module: two per weight."""
    return sum(2.0 * m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def gpu_hours(flops: float, mechanism: str) -> float:
    """Return the GPU hours of training FLOPs under the assumption that `assumption` states."""
    return flops / (ASSUMED_FLOPS * _assumed_mfu(mechanism)) / 3600


def assumption(mechanism: str) -> str:
    """Return the assumption behind the GPU hours of a mechanism."""
    source = f"as {mechanism} reached on an H200 at 1.5b"
    if mechanism not in MEASURED_MFU:
        source = f"which vanilla reached on an H200 at 1.5b; {mechanism} was not measured, and may be slower"
    peak = f"{ASSUMED_FLOPS / 1e12:.0f} TFLOP/s"
    return f"in bf16 on H100 GPUs at {_assumed_mfu(mechanism):.1%} of their {peak}, {source}"


def _assumed_mfu(mechanism: str) -> float:
    return MEASURED_MFU.get(mechanism, MEASURED_MFU["vanilla"])


def long_run_remark(config: Config) -> str:
    """Return a remark on the batch of a run of more than a million steps, else an empty text."""
    length = config.training.sequence_length
    tokens, larger = config.training.batch_size * length, max(1, 2**20 // length)
    if (run_steps(config) or 0) <= LONG_RUN or larger <= config.training.batch_size:
        return ""
    return f"{tokens:,} tokens a step are few for so long a run; training.batch_size={larger} takes fewer steps"


def cost_rows(hours: float, source: str, price: float | None) -> dict[str, str]:
    """Return the rows of a table on the GPU hours of a run, and their cost where the price of an hour is given.

    source: where the hours are from. price: in US dollars.
    """
    rows = {"GPU hours": f"{hours_text(hours)} {source}"}
    if price is not None:
        cost = "< $0.01" if 0 < hours * price < 0.005 else f"${hours * price:,.2f}"
        rows["cost"] = f"{cost} at ${price:,.2f} per GPU hour"
    return rows


def _part(owned: OwnedParameter) -> str:
    if owned.name.startswith("connections."):
        return "connection"
    if isinstance(owned.owner, Norm):
        return "norms"
    if isinstance(owned.owner, Embedding | Head):
        return "embedding" if isinstance(owned.owner, Embedding) else "head"
    return "mlp" if ".mlp." in owned.name else "attention"
