"""What each choice of activation checkpointing saves and costs."""

import math

from depthlm.accounting.flops import flops_per_token
from depthlm.accounting.overhead import overhead
from depthlm.model import Decoder

# values of training.activation_checkpointing that `summary` compares; any n is possible
CHOICES: tuple[bool | int | str, ...] = (False, "selective", 2, True)


def recomputed_flops(model: Decoder, how: bool | int | str, sequence_length: int) -> float:
    """Return the FLOPs per token that the backward pass computes again, besides element-wise operations.

    how: a value of training.activation_checkpointing. With selective, they are those of the mechanism, whose kernels
    run again; the mechanisms' PyTorch code computes even fewer again, since its matrix products are stored too.
    """
    if how == "selective":
        return overhead(model).flops_per_token
    flops = flops_per_token(model, sequence_length)
    passes = model.loops * model.size.num_layers
    layers = math.ceil(passes / int(how)) if how else 0
    return (flops.forward - flops.head) * layers / passes
