"""The weights with which a layer mixes the values of earlier layers (Depth-Attention, arXiv 2606.05014, Figure 3)."""

from functools import partial

import numpy as np
from torch import Tensor

from depthlm.inspect.figures import Grid, draw_grids
from depthlm.inspect.picture import Collector, Picture, over_tokens
from depthlm.inspect.tokens import token_picture
from depthlm.mechanisms.depth_attention import DepthAttention
from depthlm.model import Decoder, SublayerSpec
from depthlm.model.attention.mixers import attending
from depthlm.model.attention.self_attention import AttentionContext, DepthKV, SelfAttention


class DepthAttentionWeights(Collector):
    """Collects alpha of each layer over its sources and itself."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.sources: dict[int, list[int]] = {}
        self.layers = attending([layer.attention for layer in model.layers], model.loops)

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        past: AttentionContext,
    ) -> None:
        assert isinstance(attention, DepthAttention)
        q_bhte, k_bkte, _ = projected
        positions = attention.source_positions(len(depth))
        alpha = attention.weights(q_bhte, [*(depth[position][0] for position in positions), k_bkte])
        self.sources[spec.layer] = [*(self.layers[position] for position in positions), spec.layer]
        if alpha.ndim == 1:
            mean = alpha[:, None].expand(-1, attention.num_kv_heads)
        else:
            mean = over_tokens(alpha.transpose(2, 3))
            name, title = f"depth_attention_tokens_layer_{spec.layer}", f"layer {spec.layer}"
            self.keep(name, title, alpha[:, 0].mean(1), self.sources[spec.layer])
        self.add(spec.layer, mean, q_bhte.shape[0] * q_bhte.shape[2])

    def pictures(self) -> list[Picture]:
        heads = np.full((self.depth, self.depth, self.model.size.num_kv_heads), np.nan)
        for layer, sources in self.sources.items():
            heads[layer, sources] = self.mean(layer)
        weights = heads.mean(-1)
        about = "the weight of each source in the value of each layer (Figure 3 of arXiv 2606.05014)"
        draw = partial(
            draw_grids,
            [Grid("", weights)],
            title="Depth-attention weights",
            rows="layer",
            columns="source layer (diagonal: the layer itself)",
            values="weight, mean over tokens and heads",
        )
        arrays = {"depth_attention": weights, "depth_attention_heads": heads}
        of_tokens = token_picture(
            "depth_attention_tokens",
            "the weight of each source in the value of each token, in some layers",
            self.spread_maps("depth_attention_tokens"),
            self.token_names,
            title="Depth-attention weights of each token",
            rows="source layer",
            values="weight, mean over heads",
        )
        return [Picture("depth_attention", about, arrays, draw), *of_tokens]
