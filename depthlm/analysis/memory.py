"""Memory of training on one GPU: weights, gradients, optimizer, activations. Estimates, in bytes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlm.kernels.linear_cross_entropy import GPU_PRODUCT, GPU_WHOLE
from depthlm.model.shape import Backbone, Size

if TYPE_CHECKING:
    from depthlm.config import Config

# bytes per parameter of weights, gradients, and AdamW's two moments with the fp32 master weights of a 16-bit model
BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12), "fp16": (2, 2, 12)}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_per_gpu(parameters: int, stage: int, ranks: int, precision: str, activations: float = 0.0) -> Memory:
    """What lies on each of `ranks` GPUs under a ZeRO stage (arXiv 1910.02054).

    Stage 1 divides the optimizer's states by the ranks, stage 2 the gradients too, stage 3 the weights too.
    precision: fp32, bf16 or fp16; bf16 at stage 0 means fp32 weights under autocast, so fp32's bytes.
    activations: bytes to add, see `activation_memory`.
    Raises: ValueError for an unknown stage or precision, or ranks below 1.
    """
    if stage not in range(4) or precision not in BYTES or ranks < 1:
        raise ValueError(f"stage {stage} in 0..3, precision {precision} in {', '.join(BYTES)}, ranks {ranks} >= 1")
    per_parameter = BYTES["fp32" if precision == "bf16" and stage == 0 else precision]
    if precision == "bf16" and stage == 1:
        # DeepSpeed's bf16 optimizer keeps every gradient once more in fp32, to accumulate in
        per_parameter = (2, 6, 12)
    shares = [1 / ranks if stage >= first else 1.0 for first in (3, 2, 1)]
    weights, gradients, optimizer = (parameters * b * share for b, share in zip(per_parameter, shares, strict=True))
    return Memory(weights, gradients, optimizer, activations)


def estimate_memory(config: "Config", parameters: int, stage: int, ranks: int, micro_batch_size: int) -> Memory:
    """`memory_per_gpu` of a configuration, with the activations of one micro-batch."""
    activations = activation_memory(
        config.size,
        config.model.loops * config.size.num_layers,
        config.backbone,
        micro_batch_size,
        config.training.sequence_length,
        config.precision.name,
        config.training.activation_checkpointing,
    )
    return memory_per_gpu(parameters, stage, ranks, config.precision.name, activations)


def activation_memory(
    size: Size,
    num_layers: int,
    backbone: Backbone,
    micro_batch_size: int,
    sequence_length: int,
    precision: str,
    checkpointing: bool,
) -> float:
    """Bytes kept for the backward pass by a vanilla decoder, of one micro-batch.

    Per token, with D hidden, F of the MLP, H and K heads of size e, V vocabulary, L layers passed (num_layers, loops
    counted), w bytes of a number:

        layer:  2 D s + w (3 D + (3 H + 3 K) e + 4 F)    both sublayers' inputs (s = 4 bytes); two normed inputs and the
                                                         MLP's output; q and k before and after norm and rope, v,
                                                         context and output; gate, up, silu(gate) and their product

    With checkpointing: L D s + one layer, else L layers. The head adds the logits and their gradient, w each, whole or
    of a chunk (`linear_cross_entropy`, on a GPU).
    A mechanism's stream comes on top.
    """
    w = 4 if precision == "fp32" else 2
    heads = 3 * (size.num_heads + size.num_kv_heads) * size.head_size
    mlp = (4 if backbone.mlp == "swiglu" else 2) * size.intermediate_size
    layer = 2 * 4 * size.hidden_size + w * (3 * size.hidden_size + heads + mlp)
    kept = num_layers * 4 * size.hidden_size + layer if checkpointing else num_layers * layer
    tokens = micro_batch_size * sequence_length
    logits = tokens * size.vocab_size
    return float(tokens * kept + 2 * w * (logits if logits <= GPU_WHOLE else GPU_PRODUCT))
