"""Shared keys and values: some layers attend to those of an earlier layer, and have none of their own.

    layer l that keeps:   q, k, v -> k, v to the cache -> attention
    layer that reuses l:  q --------> k, v of layer l --> attention

The keys are those that the earlier layer attended to, after QK-norm and RoPE. Layers that reuse have no projections of
keys and values, and no place in the KV cache.
"""

from torch import Tensor

from depthlm.model.attention.context import AttentionContext
from depthlm.model.attention.self_attention import DepthKV, SelfAttention, attend_to, causal_attention
from depthlm.model.figures import Figure
from depthlm.model.layers import Rope
from depthlm.model.settings import at_least, check, one_of
from depthlm.model.shape import Backbone, Size, SublayerSpec

PROJECTIONS = "k_proj", "v_proj", "k_norm", "kv_a_proj", "kv_a_norm", "kv_b_proj"


class SharedKV(SelfAttention):
    """Self-attention to the keys and values of this layer or of an earlier one.

    reuse: the layers that reuse, of those with keys and values. every_second: each odd layer those of the layer before
        it (as in Cross-Layer Attention, arXiv 2405.12981); upper_half: all layers of it those of the last layer below
        (as in YOCO, arXiv 2405.05254, but with the same attention in the lower half); last_k: the last k layers those
        of the layer before them (as in Gemma 3n).
    last_k: k; None: 3L / 7, as in Gemma 3n (15 of 35 layers).
    """

    identity_start = None
    colour = "#7570B3"

    def __init__(
        self,
        spec: SublayerSpec,
        size: Size,
        backbone: Backbone,
        reuse: str = "every_second",
        last_k: int | None = None,
    ):
        super().__init__(spec, size, backbone)
        check(one_of(("every_second", "upper_half", "last_k"), reuse=reuse), at_least(1, last_k=last_k, optional=True))
        if last_k is not None and reuse != "last_k":
            raise ValueError(f"last_k={last_k}: needs reuse=last_k")
        if last_k is not None and last_k >= spec.num_layers:
            raise ValueError(f"last_k={last_k}: must be less than the {spec.num_layers} layers with keys and values")
        layers = range(spec.num_layers)
        kept = {"upper_half": -(-spec.num_layers // 2)}.get(reuse)
        if reuse == "last_k":
            kept = max(1, spec.num_layers - (last_k or max(1, 3 * spec.num_layers // 7)))
        sources = [layer - layer % 2 if kept is None else min(layer, kept - 1) for layer in layers]
        self.source = sources[spec.layer]
        self.reuses = self.source != spec.layer
        self.is_source = sources.count(spec.layer) > 1
        if self.reuses:
            self.projects_kv = False
            self.latent_size = 0
            for name in PROJECTIONS:
                if hasattr(self, name):
                    delattr(self, name)

    def project(self, q_in: Tensor, k_in: Tensor, v_in: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
        if not self.reuses:
            return super().project(q_in, k_in, v_in, rope)
        q = self.q_proj(q_in)
        if self.is_latent:
            return (q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2),)
        return (self.rotate(q, self.q_norm if self.qk_norm != "none" else None, rope),)

    def attend(
        self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext
    ) -> tuple[Tensor, DepthKV]:
        """The depth list has one entry, of the newest source: all of its keys and values, also cached ones."""
        if self.reuses:
            (q,), (k, v) = projected, depth[-1]
            return attend_to(q, k, v, context), depth
        q, k, v = projected
        if not self.is_source:
            return causal_attention(q, k, v, context), depth
        k, v = context.extend(k, v)
        return attend_to(q, k, v, context), [(k, v)]

    def figures(self, projected: tuple[Tensor, ...], depth: DepthKV, context: AttentionContext) -> list[Figure]:
        about = "the layer whose keys and values each layer attends to"
        source = self.unrolled(self.source, context)
        return [Figure("source", self.q_proj.weight.new_ones(1), ("layer",), about, "layer", places=[source])]

    def retained(self, depth: DepthKV) -> list[Tensor]:
        # a layer with keys and values of its own follows the last one that reuses those before it
        return super().retained(depth) if self.reuses else []

    def cache_values(self) -> float:
        return 0.0 if self.reuses else super().cache_values()
