"""Value residual (ResFormer, arXiv 2410.17897): the values of every layer are mixed with those of layer 0.

    v_l <- a v_l + b v_0

    v_0 of layer 0 --> * b --.
    q, k, v ----> v -> * a -(+)-> v -> causal attention with q and k

The KV cache stores the mixed values, so generation needs no other state.
"""

import torch
from torch import Tensor, nn

from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV, SelfAttention, causal_attention
from depthlm.model.edges import per_token
from depthlm.model.figures import Figure
from depthlm.model.settings import check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec

# the initial a and b
STARTS = {"paper": (0.5, 0.5), "identity": (1.0, 0.0)}


class ValueResidual(SelfAttention):
    """Self-attention with the values of layer 0 in those of all other layers.

    weights: learned: a and b of each layer, initially 1/2; fixed: both remain 1/2. A looped decoder has one layer 0,
        that of the first loop, so every layer has weights.
    start: paper: as above; identity: a is initially 1, and b 0, so that the decoder initially equals vanilla. Needs
        learned weights.
    """

    identity_start = "start=identity"
    colour = "#4B0082"

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        weights: str = "learned",
        start: str = "paper",
    ):
        super().__init__(spec, size, backbone)
        check(one_of(("learned", "fixed"), weights=weights), one_of(STARTS, start=start))
        if start == "identity" and weights == "fixed":
            raise ValueError("start=identity: fixed weights remain 1/2; needs weights=learned")
        self.start = start
        self.identity_start = "" if start == "identity" else self.identity_start
        self.mixes = spec.layer > 0 or spec.loops > 1
        if self.mixes and weights == "learned":
            self.value_weights = nn.Parameter(torch.empty(2))
            self.fp32_parameters = ("value_weights",)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.copy_(torch.tensor(STARTS[self.start]))

    def attend(
        self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext
    ) -> tuple[Tensor, DepthKV]:
        q, k, v = projected
        if depth:
            # without a dimension, they would be rounded to the dtype of v
            a, b = self.value_weights.split(1) if hasattr(self, "value_weights") else STARTS["paper"]
            if self.edit is not None:
                a, b = self.edited_weights(v, context)
            v = (a * v + b * depth[0][0]).to(v.dtype)
        else:
            depth = [(v,)]
        return causal_attention(q, k, v, context), depth

    def edited_weights(self, v_bkte: Tensor, context: AttentionContext) -> Tensor:
        """Return a and b of each token, as x_b1t1, that `edit` makes of the weights."""
        weights = getattr(self, "value_weights", v_bkte.new_tensor(STARTS["paper"]))
        ab_nbt = per_token(weights, v_bkte[:, 0])
        sources = self.unrolled(self.spec.layer, context), 0
        return self.edited(ab_nbt, ("source", "batch", "token"), context, sources, False)[:, :, None, :, None]

    def figures(self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext) -> list[Figure]:
        if not hasattr(self, "value_weights"):
            return []
        panels = "a, of the layer itself", "b, of layer 0"
        return [Figure("weights", self.value_weights, ("panel",), "the weights of the values", panels=panels)]

    def forward_flops(self, length: float, causal: bool) -> float:
        """Return the FLOPs per token, with the weighted sum."""
        return super().forward_flops(length, causal) + (3.0 * self.num_kv_heads * self.head_size if self.mixes else 0)

    def io_values(self) -> float:
        """Return the values read, v_l and v_0, and written."""
        return 3.0 * self.num_kv_heads * self.head_size if self.mixes else 0.0
