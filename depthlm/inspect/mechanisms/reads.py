"""Weights of reads: Attention Residuals (arXiv 2603.15031, Figure 8), DeepCrossAttention (2502.06785, Figure 10)."""

from functools import partial

import numpy as np
import torch

from depthlm.inspect.figures import Grid, draw_grids
from depthlm.inspect.picture import Array, Collector, Picture, over_tokens, stacked
from depthlm.inspect.tokens import token_picture
from depthlm.mechanisms.attention_residuals import AttentionResiduals, AttentionResidualsRecency
from depthlm.mechanisms.dca import GRN
from depthlm.model.connection import Connection, Stream

KINDS = {"attention": "attention", "mlp": "MLP"}
# the inputs of a read, by their number
INPUTS = {1: ["input"], 3: ["q", "k", "v"]}
TITLES = {"dca": "DeepCrossAttention", "grn": "Generalised residual network"}


class AttentionResidualWeights(Collector):
    """Collects alpha of each read over its sources."""

    def read(self, connection: Connection, stream: Stream) -> None:
        assert isinstance(connection, AttentionResiduals | AttentionResidualsRecency)
        alpha, spec = connection.weights(stream), connection.spec
        self.add(spec.sublayer, over_tokens(alpha), stream[0][..., 0].numel())
        if alpha.ndim > 1:
            title = "final read" if spec.kind == "final" else f"before layer {spec.layer} {KINDS[spec.kind]}"
            self.keep(f"attention_residuals_tokens_{spec.sublayer}", title, alpha[:, 0], range(len(alpha)))

    def pictures(self) -> list[Picture]:
        width = len(self.mean(2 * self.depth))
        alpha = stacked([self.mean(sublayer) for sublayer in range(2 * self.depth + 1)], width)
        arrays = {
            "attention_residuals_attention": alpha[:-1:2],
            "attention_residuals_mlp": alpha[1::2],
            "attention_residuals_final": alpha[-1],
        }
        connection = self.model.connections[0]
        assert isinstance(connection, AttentionResiduals | AttentionResidualsRecency)
        if isinstance(connection, AttentionResidualsRecency):
            then = "then snapshots; last the running sum"
        else:
            size = connection.block_size
            then = "then sublayer outputs" if size == 1 else f"then blocks of {size} sublayers"
        sources = f"source (0: embedding, {then})"
        draw = partial(
            draw_grids,
            [
                Grid("before attention, and the final read", alpha[::2], last_row="final"),
                Grid("before the MLP", alpha[1::2]),
            ],
            title="Attention Residuals",
            rows="layer",
            columns=sources,
            values="weight, mean over tokens",
        )
        about = "what each sublayer reads, attention and MLP in separate panels (Figure 8 of arXiv 2603.15031)"
        of_tokens = token_picture(
            "attention_residuals_tokens",
            "what some sublayers read at each token",
            self.spread_maps("attention_residuals_tokens"),
            self.token_names,
            title="Attention Residuals: the reads of each token",
            rows=sources,
            values="weight",
        )
        return [Picture("attention_residuals", about, arrays, draw), *of_tokens]


class StackWeights(Collector):
    """Collects b of each read of GRN and DeepCrossAttention, and with a gate the weights of the tokens.

    If a source is the sum of older blocks, each of these blocks has its weight.
    """

    def read(self, connection: Connection, stream: Stream) -> None:
        assert isinstance(connection, GRN)
        if connection.spec.kind == "mlp" or connection.version < 3:
            return
        by_input = [
            torch.stack([beta.mean(-1) for beta in connection.weights(stream, i)]) for i in range(connection.num_inputs)
        ]
        means = torch.stack([beta_nbt.mean((1, 2)) for beta_nbt in by_input])
        self.add(connection.spec.layer, means, stream[0][..., 0].numel())
        if connection.spec.kind == "final":
            return
        for title, beta_nbt in zip(INPUTS[len(by_input)], by_input, strict=True):
            name, layer = _name(connection), connection.spec.layer
            self.keep(f"{name}_tokens_{title}_{layer}", f"layer {layer}, {title}", beta_nbt[:, 0], _sources(connection))

    def pictures(self) -> list[Picture]:
        reads = [c for c in self.model.connections if isinstance(c, GRN) and c.spec.kind != "mlp"]
        b = [read.b.flatten(2) if read.b.ndim == 3 else read.b[..., None] for read in reads]
        means = [values.double().mean(-1).cpu().numpy() for values in b]
        deviations = [values.double().std(-1, correction=0).cpu().numpy() for values in b]
        name = _name(reads[0])
        about = "learned biases b of each block over earlier blocks (Figure 10 of arXiv 2502.06785)"
        pictures = [self._picture(reads, means, f"{name}_b", about, "b, mean over the hidden size")]
        if reads[0].version > 1:
            pictures[0].arrays.update(_by_input(reads, deviations, f"{name}_b_deviation"))
        if reads[0].version == 3:
            about = "the gated weights of each block over earlier blocks, mean over tokens"
            weights = [self.mean(read.spec.layer) for read in reads]
            pictures.append(
                self._picture(reads, weights, f"{name}_weights", about, "weight, mean over tokens and the hidden size")
            )
            pictures += token_picture(
                f"{name}_tokens",
                "the gated weights of some blocks over earlier blocks, at each token",
                self.spread_maps(*(f"{name}_tokens_{title}_" for title in INPUTS[reads[0].num_inputs])),
                self.token_names,
                title=f"{TITLES[name]}: weights of each token",
                rows="source (0: embedding, j: output of block j)",
                values="weight, mean over the hidden size",
            )
        return pictures

    def _picture(self, reads: list[GRN], values: list[Array], name: str, about: str, label: str) -> Picture:
        arrays = _by_input(reads, values, name)
        rows, final = arrays[name], arrays[f"{name}_final"]
        titles = INPUTS[len(rows)]
        grids = [Grid(title, grid) for title, grid in zip(titles, rows, strict=True)]
        grids[0] = Grid(f"{titles[0]}, and the final read", np.vstack([rows[0], final]), last_row="final")
        draw = partial(
            draw_grids,
            grids,
            title=TITLES[_name(reads[0])],
            rows="layer",
            columns="source (0: embedding, j: output of block j)",
            values=label,
        )
        return Picture(name, about, arrays, draw)


def _name(read: GRN) -> str:
    return "dca" if read.separate_qkv else "grn"


def _sources(read: GRN) -> list[str]:
    """Return the label of each source: the numbers of the blocks that it contains, as in `1 to 3`."""
    columns = _columns(read)
    blocks = [[block for block, source in enumerate(columns) if source == number] for number in range(read.num_sources)]
    return [str(some[0]) if len(some) == 1 else f"{some[0]} to {some[-1]}" for some in blocks]


def _by_input(reads: list[GRN], values: list[Array], name: str) -> dict[str, Array]:
    """Return arrays [input, layer, source], nan where there is no source, and [source] of the final read.

    A sum of blocks is expanded to its blocks.
    """
    depth = len(reads) - 1
    spread = [value[:, _columns(read)] for read, value in zip(reads, values, strict=True)]
    by_input = [stacked([value[i] for value in spread[:-1]], depth + 1) for i in range(len(spread[0]))]
    return {name: np.stack(by_input), f"{name}_final": spread[-1][0]}


def _columns(read: GRN) -> list[int]:
    """Return the index of the source that contains the embedding, and that of each earlier block."""
    blocks = read.spec.layer + 1
    summed = blocks - read.num_sources
    return [0, *([int(read.own_embedding)] * summed), *range(1, read.num_sources)]
