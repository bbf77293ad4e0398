"""Weights over depth that are parameters: DenseFormer (arXiv 2402.02622) and LAuReL (2411.07501)."""

from functools import partial

import numpy as np

from depthlm.inspect.figures import Grid, draw_curves, draw_grids
from depthlm.inspect.picture import Collector, Picture, stacked
from depthlm.mechanisms.denseformer import DenseFormer
from depthlm.mechanisms.laurel import Laurel


class Averages(Collector):
    """The weights a of DenseFormer: [block i - 1, source j], nan where the average after block i does not read X_j."""

    def pictures(self) -> list[Picture]:
        a = np.full((self.depth, self.depth + 1), np.nan)
        for connection in self.model.connections:
            if isinstance(connection, DenseFormer) and connection.sources is not None:
                a[connection.spec.layer, connection.sources] = connection.a.cpu()
        about = "the weights of the average after each block, over all blocks up to it"
        draw = partial(
            draw_grids,
            [Grid("", a, first_row=1)],
            title="DenseFormer: depth-weighted averages",
            rows="after block",
            columns="source (0: embedding, j: output of block j)",
            values="a",
        )
        return [Picture("denseformer", about, {"denseformer": a}, draw)]


class LaurelWeights(Collector):
    """alpha and beta (rw) or gamma (pa) of each sublayer. lr has no such weights."""

    def pictures(self) -> list[Picture]:
        sublayers = [c for c in self.model.connections if isinstance(c, Laurel) and c.spec.kind != "final"]
        about = "the learned weights of each sublayer"
        if sublayers[0].variant == "rw":
            pairs = np.array([[c.alpha.item(), c.beta.item()] for c in sublayers]).T
            curves = {"alpha, of the sublayer's output": pairs[0], "beta, of the skip": pairs[1]}
            draw = partial(draw_curves, {"": curves}, title="LAuReL", x="sublayer", y="weight")
            return [Picture("laurel", about, {"laurel_alpha": pairs[0], "laurel_beta": pairs[1]}, draw)]
        if sublayers[0].variant == "lr":
            return []
        gamma = stacked([c.gamma.double().cpu().numpy() for c in sublayers], sublayers[0].last_k)
        draw = partial(
            draw_grids,
            [Grid("", gamma.T)],
            title="LAuReL: gamma of each sublayer",
            rows="sublayer inputs ago",
            columns="sublayer (2l: attention, 2l + 1: MLP of layer l)",
            values="gamma",
        )
        return [Picture("laurel", about, {"laurel_gamma": gamma}, draw)]
