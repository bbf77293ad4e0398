"""The attention of MoDA over the sequence and over depth (arXiv 2603.15619, the attention maps)."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from depthlm.inspect.mechanisms.moda_figures import draw_depth_share, draw_maps
from depthlm.inspect.picture import Array, Collector, Picture, spread
from depthlm.inspect.tokens import TOKENS
from depthlm.mechanisms.moda import Moda
from depthlm.model import Decoder, SublayerSpec
from depthlm.model.attention.mixers import attending
from depthlm.model.attention.self_attention import AttentionContext, DepthKV, SelfAttention
from depthlm.ops.moda.naive import probabilities

# in the picture of the maps: evenly spaced layers and heads, as in the paper, and the first tokens
LAYERS, HEADS = 4, 4


class DepthProbabilities(Collector):
    """Collects the softmax over [sequence, depth]: maps of the first window, and the mean of each entry over tokens."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.entries: dict[int, list[tuple[int, str]]] = {}
        self.maps: dict[int, Array] = {}
        self.attending = attending([layer.attention for layer in model.layers], model.loops)
        self.layers = [self.attending[i] for i in spread(len(self.attending), LAYERS)]
        self.heads = spread(model.size.num_heads, HEADS)

    def attend(
        self,
        spec: SublayerSpec,
        attention: SelfAttention,
        projected: tuple[Tensor, ...],
        depth: DepthKV,
        past: AttentionContext,
    ) -> None:
        assert isinstance(attention, Moda)
        q_bhte, k_bkte, *_ = projected
        t = q_bhte.shape[2]
        earlier = [layer for layer in self.attending if layer < spec.layer]
        before = [(layer, kind) for layer in earlier for kind in attention.entry_kinds]
        self.entries[spec.layer] = before[len(before) - len(depth) :]
        for row in range(len(q_bhte)):  # one sequence at a time, since the scores of many heads are large
            keys = [entry[0][row : row + 1] for entry in depth]
            mask = past.mask_b1ts[row : row + 1] if past.mask_b1ts is not None else None
            p_htx = probabilities(q_bhte[row : row + 1], k_bkte[row : row + 1], keys, mask)[0]
            self.add(spec.layer, p_htx[..., t:].mean((0, 1)), t)
            if spec.layer in self.layers and spec.layer not in self.maps:
                shown = min(t, TOKENS)
                parts = (p_htx[self.heads, :shown, :shown], p_htx[self.heads, :shown, t:])
                self.maps[spec.layer] = torch.cat(parts, dim=-1).cpu().numpy()

    def pictures(self) -> list[Picture]:
        columns = {"attention": 0, "mlp": 1}
        share = np.full((self.depth, self.depth, 2), np.nan)
        for layer, entries in self.entries.items():
            for (source, kind), value in zip(entries, self.mean(layer), strict=True):
                share[layer, source, columns[kind]] = value
        about = "which tokens, and which depth entries, the queries of some layers and heads attend to"
        maps = {f"moda_map_layer_{layer}": values for layer, values in self.maps.items()}
        drawn = partial(draw_maps, self.maps, self.entries, self.heads, self.token_names)
        about_share = "how much of the attention goes to depth, and to which entries"
        return [
            Picture("moda_maps", f"{about} (the attention maps of arXiv 2603.15619)", maps, drawn),
            Picture("moda_depth_share", about_share, {"moda_depth_share": share}, partial(draw_depth_share, share)),
        ]
