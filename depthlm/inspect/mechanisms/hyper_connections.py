"""The maps of hyper-connections (arXiv 2409.19606) and mHC (2512.24880), and the gain of their products over depth."""

from functools import partial
from typing import Any

import numpy as np
import torch

from depthlm.inspect.figures import Grid, draw_curves, draw_grids, draw_matrices
from depthlm.inspect.picture import Array, Collector, Picture
from depthlm.inspect.tokens import token_picture
from depthlm.mechanisms.hyper_connections import HyperConnections, ManifoldHyperConnections
from depthlm.model import Decoder
from depthlm.model.connection import Connection, Stream

# matrices per picture, from evenly spaced sublayers
SHOWN = 6


class MixingMaps(Collector):
    """Collects H_pre, H_post and H_res of each sublayer, and the products of H_res from each sublayer to the last.

    The gain is that of the mHC paper: the largest absolute row sum for the forward signal, and the largest absolute
    column sum for the backward gradient. It is computed per token and then averaged.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.res_btij: list[torch.Tensor] = []

    def read(self, connection: Connection, stream: Stream) -> None:
        assert isinstance(connection, HyperConnections | ManifoldHyperConnections)
        tokens = stream[0].shape[0] * stream[0].shape[1]
        if connection.spec.kind != "final":
            maps = connection.maps(connection.streams(stream))
            for name, value in zip(("pre", "post", "res"), maps, strict=True):
                self.add((name, connection.spec.sublayer), value.mean((0, 1)), tokens)
            self.res_btij.append(maps[2].double())
            if isinstance(connection, ManifoldHyperConnections) or connection.dynamic:
                sublayer, streams = connection.spec.sublayer, range(connection.num_streams)
                for part, value in zip(("pre", "post"), maps, strict=False):
                    name, title = f"{_name(self.model)}_tokens_{part}_{sublayer}", f"H_{part} of sublayer {sublayer}"
                    self.keep(name, title, value[0].T, streams)
            return
        product = torch.eye(connection.num_streams, dtype=torch.float64, device=stream[0].device)
        for sublayer, res in reversed([*enumerate(self.res_btij)]):
            product = product @ res
            self.add(("composite", sublayer), product.mean((0, 1)), tokens)
            for name, map_btij in (("single", res), ("composite", product)):
                self.add((name, "gain", sublayer), _gains(map_btij), tokens)
        self.res_btij = []

    def pictures(self) -> list[Picture]:
        name = _name(self.model)
        title = "mHC" if name == "mhc" else "Hyper-connections"
        pre, post, res, composite = (self._all(part) for part in ("pre", "post", "res", "composite"))
        single_gain, composite_gain = (self._all(part, "gain") for part in ("single", "composite"))
        matrices = partial(_draw_matrices, res, composite, title)
        x = "sublayer (2l: attention, 2l + 1: MLP of layer l)"
        maps = partial(
            draw_grids,
            [Grid("H_pre: what a sublayer reads", pre.T), Grid("H_post: where its output goes", post.T)],
            title=title,
            rows="stream",
            columns=x,
            values="mean over tokens",
            below=True,
        )
        curves = {
            "H_res of one sublayer": _curves(single_gain),
            "product of H_res from a sublayer to the last": _curves(composite_gain),
        }
        gain = partial(draw_curves, curves, title=f"{title}: gain", x=x, y="largest absolute sum")
        res_arrays = {f"{name}_res": res, f"{name}_composite": composite}
        gain_arrays = {f"{name}_gain": single_gain, f"{name}_composite_gain": composite_gain}
        return [
            Picture(f"{name}_res", "mixing matrices H_res, and their products up to the last", res_arrays, matrices),
            Picture(f"{name}_maps", "H_pre and H_post", {f"{name}_pre": pre, f"{name}_post": post}, maps),
            Picture(f"{name}_gain", "gain of one map, and of the product up to the last", gain_arrays, gain),
            *token_picture(
                f"{name}_tokens",
                "H_pre and H_post of some sublayers, at each token",
                self.spread_maps(f"{name}_tokens_pre_", f"{name}_tokens_post_"),
                self.token_names,
                title=f"{title}: what a sublayer reads (H_pre) and where its output goes (H_post), at each token",
                rows="stream",
                values="weight",
            ),
        ]

    def _all(self, *part: str) -> Array:
        return np.stack([self.mean((*part, sublayer)) for sublayer in range(2 * self.depth)])


def _name(model: Decoder) -> str:
    return "mhc" if isinstance(model.connections[0], ManifoldHyperConnections) else "hyper_connections"


def _gains(map_btij: torch.Tensor) -> torch.Tensor:
    """Return the mean gains over tokens, [forward, backward]."""
    sizes = map_btij.abs()
    return torch.stack([sizes.sum(-1).amax(-1).mean(), sizes.sum(-2).amax(-1).mean()])


def _curves(gain: Array) -> dict[str, Array]:
    return {"forward: row sum": gain[:, 0], "backward: column sum": gain[:, 1]}


def _draw_matrices(res: Array, composite: Array, title: str) -> Any:
    last = len(res) - 1
    shown = sorted({round(number) for number in np.linspace(0, last, SHOWN)})
    rows = [
        [(f"sublayer {number}", res[number]) for number in shown],
        [(f"{number} to {last}", composite[number]) for number in shown],
    ]
    return draw_matrices(rows, title=f"{title}: H_res of a sublayer (above), product from it to the last (below)")
