"""The parts of every layer, one token and one vector at a time, in float64.

Shapes: t tokens, d hidden size, e head size. Vectors of one token have no suffix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.model.shape import Backbone, Size


class Model(NamedTuple):
    """The inputs of all formulas. p: the parameters, keyed by their names in the decoder's state_dict."""

    p: dict[str, Tensor]
    size: Size
    backbone: Backbone
    loops: int

    @property
    def depth(self) -> int:
        """The number of layers, counting each loop."""
        return self.loops * self.size.num_layers

    @property
    def attending(self) -> list[int]:
        """The layers with keys and values."""
        return [layer for layer in range(self.size.num_layers) if self.mixer(layer) != "delta"]

    def mixer(self, layer: int) -> str:
        """The mixer of a layer: the last one of the list in the last layer, else the list again and again."""
        mixers = self.backbone.mixers
        return mixers[-1] if layer == self.size.num_layers - 1 else mixers[layer % len(mixers)]


def linear(m: Model, name: str, x: Tensor) -> Tensor:
    y = m.p[f"{name}.weight"] @ x
    return y + m.p[f"{name}.bias"] if f"{name}.bias" in m.p else y


def rms_normed(m: Model, x: Tensor, eps: float | None = None) -> Tensor:
    return x / torch.sqrt((x * x).mean() + (m.backbone.norm_eps if eps is None else eps))


def norm(m: Model, name: str, x: Tensor) -> Tensor:
    if m.backbone.norm == "rmsnorm":
        return rms_normed(m, x) * m.p[f"{name}.weight"]
    centred = x - x.mean()
    deviation = torch.sqrt((centred * centred).mean() + m.backbone.norm_eps)
    return centred / deviation * m.p[f"{name}.weight"] + m.p[f"{name}.bias"]


def softmax(scores: list[Tensor]) -> list[Tensor]:
    largest = max(score.item() for score in scores)
    exponentials = [torch.exp(score - largest) for score in scores]
    return [one / sum(exponentials) for one in exponentials]


def weighted_sum(weights: list[Tensor], vectors: list[Tensor]) -> Tensor:
    return sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))


def embed(m: Model, token: int, t: int) -> Tensor:
    x = m.p["embedding.weight"][token]
    return x + sinusoid(t, len(x)) if m.backbone.position == "sinusoidal" else x


def sinusoid(t: int, width: int) -> Tensor:
    """Half sines, half cosines, wavelengths 2 pi to 2 pi * 10 000; fp32 angles, as in the decoder."""
    half = width // 2
    angles = torch.tensor(float(t)) * 10000.0 ** -(torch.arange(half, dtype=torch.float32) / (half - 1))
    return torch.cat((angles.sin(), angles.cos(), torch.zeros(width - 2 * half))).double()


def rotate(m: Model, x: Tensor, t: int) -> Tensor:
    """RoPE: the pair (x_i, x_(i+e/2)) turns by t * theta^(-2i/e); fp32 angles, as in the decoder."""
    if m.backbone.position != "rope":
        return x
    e = len(x)
    frequencies = 1.0 / m.backbone.rope_theta ** (torch.arange(0, e, 2, dtype=torch.float32) / e)
    angles = torch.tensor(float(t)) * frequencies
    cos, sin = angles.cos().double(), angles.sin().double()
    first, second = x[: e // 2], x[e // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin))


def normed_heads(m: Model, projection: str, norm_name: str, x: Tensor, t: int) -> list[Tensor]:
    """Queries or keys of one token, head by head: projection, QK-norm, then RoPE."""
    y = linear(m, projection, x)
    if m.backbone.qk_norm == "full":
        y = norm(m, norm_name, y)
    heads = list(y.split(m.size.head_size))
    if m.backbone.qk_norm == "head":
        heads = [norm(m, norm_name, head) for head in heads]
    return [rotate(m, head, t) for head in heads]


def plain_heads(m: Model, projection: str, x: Tensor) -> list[Tensor]:
    """Values of one token, head by head."""
    return list(linear(m, projection, x).split(m.size.head_size))


def mlp(m: Model, name: str, x: Tensor) -> Tensor:
    up = linear(m, f"{name}.up_proj", x)
    if m.backbone.mlp == "relu":
        return linear(m, f"{name}.down_proj", up.clamp(min=0))
    gate = linear(m, f"{name}.gate_proj", x)
    return linear(m, f"{name}.down_proj", gate * torch.sigmoid(gate) * up)
