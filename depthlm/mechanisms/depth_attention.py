"""Depth-Attention (arXiv 2606.05014): attention over depth mixes the value of a layer with those of earlier layers.

This happens before attention over the sequence.

Shapes: b batch, t new tokens, h query heads, k key/value heads, n sources and the layer itself, e head size.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV, SelfAttention, causal_attention
from depthlm.model.figures import Figure
from depthlm.model.settings import at_least, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.depth_attention.naive import depth_value_mix, depth_weights
from depthlm.ops.depth_reduce import interpolate, weighted_sum


class DepthAttention(SelfAttention):
    """Self-attention with mixed values. At every position and key/value head (section 3.2):

    qbar = mean of the head's queries;  alpha = softmax_j(qbar . k_j / sqrt(e)) over the sources j and this layer
    vmix = sum_j alpha_j v_j, where v_j is the mixed value of a source j, or v of this layer

    depth: (k_j, v_j) of earlier layers --.
    q, k, v -----> q, k ------------------+-> alpha -> vmix -> causal attention with q, k, vmix
                   `------------------------------------------^    `-> (k, vmix), a source of later layers

    It has no parameters, but with start=identity. The KV cache stores the mixed value in place of the value, so
    generation needs no other state.

    stride: s; None: L / 2.
    sources: anchored: all earlier layers with index % s == 0; relative: layers l-s, l-2s, ... A looped decoder also
        reads this layer's own (k, v) of earlier loops.
    mixing: softmax, or uniform weights.
    mixes: value, key or key_value. The key and the value of a source are those that its own attention used.
    start: paper; identity: (1 - g) x + g mix in place of the mix of an object x, with a parameter g of each key/value
        head that is initially 0, so that the decoder initially equals vanilla. A bias on the scores of the sources
        would have to be minus infinity, where it has no gradient.
    """

    identity_start = "start=identity"
    colour = "#0072B2"

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        stride: int | None = None,
        sources: str = "anchored",
        mixing: str = "softmax",
        mixes: str = "value",
        start: str = "paper",
    ):
        super().__init__(spec, size, backbone)
        check(
            at_least(1, stride=stride, optional=True),
            one_of(("anchored", "relative"), sources=sources),
            one_of(("softmax", "uniform"), mixing=mixing),
            one_of(("value", "key", "key_value"), mixes=mixes),
            one_of(("paper", "identity"), start=start),
        )
        self.stride = stride or max(1, spec.num_layers // 2)
        self.anchored = sources == "anchored"
        self.mixing = mixing
        self.objects = mixes.split("_")
        self.gate: nn.Parameter | None = None
        if start == "identity":
            self.identity_start = ""
            if self.num_mixed():
                self.gate = nn.Parameter(torch.empty(self.num_kv_heads))
                self.fp32_parameters = ("gate",)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
        tensor.zero_()

    def source_layers(self, layer: int) -> range:
        """Return the layers of the same loop that a layer reads, ascending."""
        return range(0 if self.anchored else layer % self.stride, layer, self.stride)

    def source_positions(self, passed: int) -> list[int]:
        """Return the unrolled positions of the sources, in the order of the weights, after `passed` unrolled layers."""
        loop_start = passed - self.spec.layer
        inside = [loop_start + j for j in self.source_layers(self.spec.layer)]
        return [*inside, *range(self.spec.layer, loop_start, self.spec.num_layers)]

    def is_source(self) -> bool:
        """Return whether a later loop or layer reads this layer."""
        later = range(self.spec.layer + 1, self.spec.num_layers)
        return self.spec.loops > 1 or any(self.spec.layer in self.source_layers(layer) for layer in later)

    def attend(
        self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext
    ) -> tuple[Tensor, DepthKV]:
        q, k, v = projected
        # the depth list has one entry per unrolled layer, in order; it is empty where no layer reads it
        positions = self.source_positions(len(depth))
        sources = [depth[position] for position in positions]
        if sources:
            keys, values = ([*earlier, this] for earlier, this in zip(zip(*sources, strict=True), (k, v), strict=True))
            alpha = None
            if self.edit is not None:
                alpha = self.edited_weights(q, keys, [*positions, len(depth)], context)
            if "value" in self.objects:
                v = self.mix(q, keys, values, alpha)
            if "key" in self.objects:
                k = self.mix(q, keys, keys, alpha)
        depth = [*depth, (k, v) if self.is_source() else ()]
        return causal_attention(q, k, v, context), depth

    def mix(self, q_bhte: Tensor, keys: list[Tensor], entries: list[Tensor], alpha: Tensor | None) -> Tensor:
        """Return the weighted sum of entries, keys or values.

        With start=identity, return (1 - g) times the entry of this layer plus g times that sum.

        keys: those of the sources and of this layer. alpha: the weights that `edit` made; None: those of this layer.
        """
        if alpha is None and self.mixing == "uniform":
            alpha = self.weights(q_bhte, keys)
        mixed_bkte = depth_value_mix(q_bhte, keys, entries) if alpha is None else weighted_sum(alpha, entries)
        return mixed_bkte if self.gate is None else interpolate(entries[-1], mixed_bkte, self.gate[:, None, None])

    def edited_weights(
        self, q_bhte: Tensor, keys: list[Tensor], numbers: list[int], context: AttentionContext
    ) -> Tensor:
        """Return alpha_nbkt that `edit` makes of the weights. numbers: of the sources and of this layer."""
        alpha = self.weights(q_bhte, keys)
        alpha_nbkt = alpha.view(-1, 1, 1, 1).expand(-1, *keys[-1].shape[:3]) if alpha.ndim == 1 else alpha
        return self.edited(alpha_nbkt, ("source", "batch", "head", "token"), context, numbers, True)

    def weights(self, q_bhte: Tensor, keys: list[Tensor]) -> Tensor:
        """Return alpha of the sources and of this layer: [n, b, k, t], or [n] for uniform weights."""
        if self.mixing == "softmax":
            return depth_weights(q_bhte, keys)
        exact = torch.promote_types(q_bhte.dtype, torch.float32)
        return torch.full((len(keys),), 1 / len(keys), dtype=exact, device=q_bhte.device)

    def figures(self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext) -> list[Figure]:
        q_bhte, k_bkte, _ = projected
        positions = [*self.source_positions(len(depth)), len(depth)]
        alpha = self.weights(q_bhte, [*(depth[position][0] for position in positions[:-1]), k_bkte])
        if self.identity_start == "" and alpha.ndim == 1:
            # the gates differ between heads; all layers must have the same axes
            alpha = alpha[:, None, None, None].expand(-1, q_bhte.shape[0], self.num_kv_heads, q_bhte.shape[2])
        if self.gate is not None:
            g_kt = self.gate[:, None]
            alpha = torch.cat([g_kt * alpha[:-1], g_kt * alpha[-1:] + (1 - g_kt)])
        axes = ("layer", "batch", "head", "token")[: alpha.ndim]
        about = "the weight of each source in the value of each layer (Figure 3 of arXiv 2606.05014)"
        return [Figure("weights", alpha, axes, about, "source layer (diagonal: the layer itself)", places=positions)]

    def retained(self, depth: DepthKV) -> list[Tensor]:
        if self.spec.loops > 1:
            return super().retained(depth)
        later = range(self.spec.layer, self.spec.num_layers)
        read = {source for layer in later for source in self.source_layers(layer)}
        return super().retained([depth[j] for j in sorted(read) if j < self.spec.layer])

    def num_mixed(self) -> float:
        """Return the number of values that this layer mixes, as a mean over the loops; 0 without sources."""
        inside = len(self.source_layers(self.spec.layer))
        counts = [inside + loop for loop in range(self.spec.loops)]
        return sum(count + 1 for count in counts if count) / self.spec.loops

    def forward_flops(self, length: float, causal: bool) -> float:
        """Return the FLOPs per token, with the scores and the sum of each mixed object (appendix B.2)."""
        scores = self.key_size if self.mixing == "softmax" else 0
        own = 2.0 * self.num_kv_heads * self.num_mixed() * (scores + self.width(self.objects))
        own += 0.0 if self.gate is None else 3.0 * self.num_kv_heads * self.width(self.objects)
        return super().forward_flops(length, causal) + own

    def io_values(self) -> float:
        """Return the values that scores and sums read, plus the mixed objects written in every layer (B.2, eq. 6).

        With start=identity, also an object and its mix, read again, and the written (1 - g) x + g mix.
        """
        read = set(self.objects) | ({"key"} if self.mixing == "softmax" else set())
        gated = 0 if self.gate is None else 3 * self.width(self.objects)
        return self.num_kv_heads * (self.width(read) * self.num_mixed() + self.width(self.objects) + gated)

    def width(self, objects: Iterable[str]) -> int:
        """Return the values of a key, a value or both, per head."""
        return sum(self.key_size if name == "key" else self.head_size for name in objects)
