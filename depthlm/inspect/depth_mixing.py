"""The depth mixing matrix of a connection (Attention Residuals, arXiv 2603.15031, Table 6).

    input_l = sum_j M[l, j] output_j

Output 0 is the embedding and output j that of sublayer j - 1. The last row is the final read. Every connection computes
such a sum once its weights are fixed, so M compares all of them.

Shapes: b batch, t tokens, d hidden size.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from depthlm.inspect.picture import NOTHING, Array, Grid, Means, Picture, draw_grid, write_labels
from depthlm.model import Connection, Decoder, Observer, SublayerSpec
from depthlm.model.connection import Inputs, State
from depthlm.runs.plots import subplots

# panels side by side, and labels of an axis
ACROSS, LABELS = 3, 14


@torch.no_grad()
def depth_mixing(model: Decoder, windows: Iterable[Tensor]) -> tuple[Array, list[str]]:
    """Return M[l, j] of a decoder, and a message if it is not exact.

    M is the mean over all tokens of windows of tokens_bt. It is nan for j > l.
    """
    mixing = Mixing(model)
    device = next(model.parameters()).device
    for tokens_bt in windows:
        model.hidden(tokens_bt.to(device), observer=mixing)
    name = type(model.connections[0]).__qualname__
    warning = (
        f"{name} defines no weights(state), but its weights depend on the state: its depth mixing matrix includes the "
        "derivatives of the weights; define weights(state), and use the weights that read(state, weights) gets"
    )
    return mixing.means["matrix"], [warning] if mixing.differentiates_weights else []


class Mixing(Observer):
    """Collects the outputs of a forward pass, and at its end the matrix of its tokens."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.means = Means()
        self.differentiates_weights = False

    def open(self, embedding_btd: Tensor) -> None:
        self.outputs = [embedding_btd]

    def write(self, spec: SublayerSpec, output_btd: Tensor) -> None:
        self.outputs.append(output_btd)

    def read(self, connection: Connection, state: State) -> None:
        if connection.spec.kind == "final":
            matrix = mixing_matrix(self.model.connections, self.outputs)
            self.means.add("matrix", matrix.numpy(), self.outputs[0][..., 0].numel())
            if type(connection).weights is Connection.weights:
                self.differentiates_weights |= derivatives_vary(self.model.connections, self.outputs)
            self.outputs = []


@torch.enable_grad()
def mixing_matrix(connections: Sequence[Connection], outputs: Sequence[Tensor]) -> Tensor:
    """Return M of these outputs, the embedding first.

    With fixed weights, input_l = sum_j A_lj output_j with a D x D matrix A_lj for each token, and M[l, j] is the mean
    of trace(A_lj) / D over the tokens. The trace is that of products with the Fourier vectors s_t of token t, whose
    entry c is exp(2 pi i t c / T), since the mean of s_t^* A s_t over T >= D tokens is exactly

        trace(A)            if A is the same for all tokens, because the mean of s_t s_t^* is the identity matrix
        mean of trace(A_t)  if A is diagonal, because all |s_tc| are 1
    """
    d, tokens = outputs[0].shape[-1], outputs[0][..., 0].numel()
    copies = math.ceil(d / tokens)
    leaves = [y.detach().repeat(copies, 1, 1).requires_grad_() for y in outputs]
    shape, count = leaves[0].shape, copies * tokens
    t, c = (torch.arange(length, dtype=torch.float64) for length in (count, d))
    angles_td = torch.outer(t, c) % count * (2 * math.pi / count)
    probes = [part.to(leaves[0]).view(shape) for part in (angles_td.cos(), angles_td.sin())]
    matrix = torch.full((len(outputs), len(outputs)), math.nan, dtype=torch.float64)
    for row, inputs in enumerate(linear_inputs(connections, leaves)):
        earlier = leaves[: row + 1]
        matrix[row, : row + 1] = 0
        for probe in probes:
            gradients = torch.autograd.grad(
                inputs, earlier, [probe] * len(inputs), retain_graph=True, materialize_grads=True
            )
            products = [(probe.double() * gradient).mean() for gradient in gradients]
            matrix[row, : row + 1] += torch.stack(products).cpu() / len(inputs)
    return matrix


@torch.enable_grad()
def derivatives_vary(connections: Sequence[Connection], outputs: Sequence[Tensor]) -> bool:
    """Return whether the derivatives of the inputs differ between tokens. Those of parameters alone do not."""
    leaves = [y.detach().requires_grad_() for y in outputs]
    total = torch.stack([x.sum() for inputs in linear_inputs(connections, leaves) for x in inputs]).sum()
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return any(bool((x - x[:1, :1]).abs().max() > 1e-3 * x.abs().max()) for x in gradients)


def linear_inputs(connections: Sequence[Connection], outputs: Sequence[Tensor]) -> Iterator[Inputs]:
    """Yield the inputs of every sublayer, and then the final hidden state, as linear functions of the outputs."""
    *sublayers, last = connections
    state = connections[0].open(outputs[0])
    for connection, output_btd in zip(sublayers, outputs[1:], strict=True):
        inputs, carry = linear_read(connection, state)
        yield inputs
        state = connection.write(state, output_btd, carry)
    # by default, close is a read
    is_read = type(last).close is Connection.close
    yield (linear_read(last, state)[0][0] if is_read else last.close(state),)


def linear_read(connection: Connection, state: State) -> tuple[Inputs, Any]:
    """Return the result of `read` with its weights as constants."""
    weights = connection.weights(state)
    if weights is None:
        return connection.read(state)
    return connection.read(state, tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, weights))


def mixing_picture(matrices: Sequence[tuple[str, Array]]) -> Picture:
    """Return the picture of matrices with their titles. Their arrays are depth_mixing, depth_mixing_2, ..."""
    names = ["depth_mixing", *(f"depth_mixing_{number}" for number in range(2, len(matrices) + 1))]
    about = "the weight of each earlier output in the input of each sublayer (Table 6 of arXiv 2603.15031)"
    arrays = {name: matrix for name, (_, matrix) in zip(names, matrices, strict=True)}
    return Picture("depth_mixing", about, arrays, partial(draw_mixing, matrices))


def draw_mixing(matrices: Sequence[tuple[str, Array]]) -> Any:
    """Draw matrices [input, output] with their titles, on a diverging scale around 1, the weight in a sum."""
    import matplotlib
    from matplotlib.colors import TwoSlopeNorm

    across = min(ACROSS, len(matrices))
    down = -(-len(matrices) // across)
    side = float(np.clip(0.24 * max(len(matrix) for _, matrix in matrices), 2.4, 5.0))
    alike = len({len(matrix) for _, matrix in matrices}) == 1
    figure, axes = subplots(across, side * across + 2.2, (side + 0.35) * down + 1.2, rows=down)
    every = np.concatenate([matrix[np.isfinite(matrix)] for _, matrix in matrices])
    norm = TwoSlopeNorm(1.0, every.min(initial=0.0), every.max(initial=2.0))
    colours = matplotlib.colormaps["PuOr_r"].with_extremes(bad=NOTHING)
    for number, (place, (title, matrix)) in enumerate(zip(axes.flat, matrices, strict=False)):
        image = draw_grid(place, Grid(title, matrix, last_row="final read"), norm, colours)
        label_axes(place, len(matrix))
        # labels that are the same as those of a panel beside or below it
        place.tick_params(
            labelleft=not alike or number % across == 0, labelbottom=not alike or number + across >= len(matrices)
        )
    for place in axes.flat[len(matrices) :]:
        place.set_visible(False)
    figure.supylabel("input of", fontsize="medium")
    write_labels(figure, "Depth mixing: the weight of each output in each input", "output of")
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label="weight, mean over tokens")
    return figure


def label_axes(axes: Any, rows: int) -> None:
    """Label the sources and the rows of a matrix by sublayer."""
    kinds = ("attention", "MLP")
    sublayers = [f"layer {sublayer // 2} {kinds[sublayer % 2]}" for sublayer in range(rows - 1)]
    # an even step labels sublayers of one kind
    step = 1 if rows <= LABELS else 2 * -(-rows // (2 * LABELS))
    sources, inputs = ["embedding", *sublayers], [*sublayers, "final read"]
    axes.set_xticks(range(0, rows, step), sources[::step], size=7, rotation=90)
    shown = [*range(0, rows - step, step), rows - 1]
    axes.set_yticks(shown, [inputs[row] for row in shown], size=7)
