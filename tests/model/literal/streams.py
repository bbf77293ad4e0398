"""Connections over n parallel streams, for one token. The arguments are those of `connections`."""

from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor

from .parts import Model, rms_normed, softmax, weighted_sum

Coefficients = tuple[Tensor, Tensor, Tensor | None]


def through_streams(
    m: Model,
    s: int,
    x_0: Tensor,
    f: list[Tensor],
    num_streams: int,
    collapse: str,
    coefficients: Callable[[int, list[Tensor]], Coefficients],
    reads_previous: bool = False,
) -> list[Tensor]:
    """X <- H_res X + H_post^T f(H_pre X) over n streams that start as copies of the embedding.

    reads_previous: H_pre is that of the sublayer before; the first sublayer reads stream 0 (DeepSeek-V4.1).
    """
    n = num_streams
    x, previous = [x_0] * n, torch.eye(n, dtype=x_0.dtype)[0]
    for i in range(s):
        own, post, res = coefficients(i, x)
        previous = own
        res = torch.eye(n, dtype=x_0.dtype) if res is None else res
        x = [weighted_sum([*res[a], post[a]], [*x, f[i]]) for a in range(n)]
    if s < 2 * m.depth:
        pre = previous if reads_previous else coefficients(s, x)[0]
        return [weighted_sum(list(pre), x)]
    if collapse == "last":
        return [weighted_sum(list(previous), x)]
    if collapse == "gated":
        pre, _, _ = coefficients(s, x)
        return [weighted_sum(list(pre), x)]
    if collapse == "learned":
        return [weighted_sum(softmax(list(m.p[f"connections.{s}.collapse.weights"])), x)]
    return [sum(x) / n if collapse == "mean" else sum(x)]


def hyper_connections(
    m: Model,
    s: int,
    x_0: Tensor,
    f: list[Tensor],
    num_streams: int = 4,
    dynamic: bool = True,
    collapse: str = "mean",
) -> list[Tensor]:
    """arXiv 2409.19606: static coefficients plus scale * tanh(norm(X) W)."""
    n = num_streams

    def coefficients(i: int, x: list[Tensor]) -> Coefficients:
        own = f"connections.{i}"
        pre, post, res = (m.p[f"{own}.static_{kind}"] for kind in ("pre", "post", "res"))
        if not dynamic:
            return pre, post, res
        w, scale = m.p[f"{own}.w"], m.p[f"{own}.scale"]
        tanh = torch.stack([torch.tanh(w @ rms_normed(m, x_j)) for x_j in x], dim=1)  # row of w, stream j
        return pre + scale[0] * tanh[0], post + scale[1] * tanh[1], res + scale[0] * tanh[2:]

    return through_streams(m, s, x_0, f, n, collapse, coefficients)


def mhc(
    m: Model,
    s: int,
    x_0: Tensor,
    f: list[Tensor],
    num_streams: int = 4,
    iterations: int = 20,
    collapse: str = "mean",
    residual: str = "sinkhorn",
    norm: str = "weighted",
    post_scale: float = 2.0,
    pre_eps: float = 0.0,
    post_eps: float = 0.0,
    res_eps: float = 0.0,
    start: str = "vanilla",
    read: str = "own",
    norm_eps: float | None = None,
) -> list[Tensor]:
    """arXiv 2512.24880: hyper-connections whose H_res is doubly stochastic and whose H_pre, H_post are positive.

    DeepSeek-V4 and Hunyuan V4: epsilons, a norm without a weight, H_res = 1, a gated sum at the end. DeepSeek-V4.1: the
    H_pre of the sublayer before.
    """
    n = num_streams

    def coefficients(i: int, x: list[Tensor]) -> Coefficients:
        own = f"connections.{i}"
        x = rms_normed(m, torch.cat(x), norm_eps)
        if i == 2 * m.depth:
            own = f"{own}.collapse"
        elif norm == "weighted":
            x = x * m.p[f"{own}.norm"]
        product, alpha, bias = m.p[f"{own}.phi"] @ x, m.p[f"{own}.alpha"], m.p[f"{own}.bias"]
        pre = torch.sigmoid(alpha[0] * product[:n] + bias[:n]) + pre_eps
        if i == 2 * m.depth:
            return pre, pre, None
        post = post_scale * torch.sigmoid(alpha[1] * product[n : 2 * n] + bias[n : 2 * n]) + post_eps
        if residual == "identity":
            return pre, post, None
        res = alpha[2] * product[2 * n :] + bias[2 * n :]
        if residual == "permutations":
            matrices = [torch.eye(n, dtype=res.dtype)[list(order)] for order in permutations(range(n))]
            return pre, post, weighted_sum(softmax(list(res)), matrices)
        if residual == "kronecker":
            product = torch.ones(1, 1, dtype=res.dtype)
            for logits in res.split(2):
                p, q = softmax(list(logits))
                product = torch.kron(product, torch.stack([torch.stack([p, q]), torch.stack([q, p])]))
            return pre, post, product
        return pre, post, sinkhorn_knopp(res.view(n, n), iterations, res_eps)

    return through_streams(m, s, x_0, f, n, collapse, coefficients, read == "previous")


def sinkhorn_knopp(logits: Tensor, iterations: int, eps: float = 0.0) -> Tensor:
    """Normalize columns, then rows, in each iteration. Entry [i, j]: from stream j to stream i."""
    matrix = torch.exp(logits)
    for iteration in range(iterations):
        columns = matrix.sum(dim=0)[None, :]
        matrix = matrix / (columns + eps) if iteration else matrix / columns + eps
        matrix = matrix / (matrix.sum(dim=1)[:, None] + eps)
    return matrix


def qwen4_exp(m: Model, s: int, x_0: Tensor, f: list[Tensor], num_streams: int = 4, rank: int = 320) -> list[Tensor]:
    """h = mean_i g_i * RMSNorm_i(X_i), X_k <- X_k + 2 sigmoid(W_inject x / n)_k f, transformers 5.23.0."""
    n, x = num_streams, [x_0] * num_streams

    def normed(i: int) -> list[Tensor]:
        return [rms_normed(m, x_k) * weight for x_k, weight in zip(x, m.p[f"connections.{i}.norm"], strict=True)]

    for i in range(s):
        inject = 2 * torch.sigmoid(m.p[f"connections.{i}.inject.weight"] @ torch.cat(normed(i)) / n)
        x = [x_k + inject_k * f[i] for x_k, inject_k in zip(x, inject, strict=True)]
    low = m.p[f"connections.{s}.down.weight"] @ torch.cat(normed(s)) / n
    gate = torch.sigmoid(m.p[f"connections.{s}.up.weight"] @ (low * torch.sigmoid(low)))
    return [sum(g * x_k for g, x_k in zip(gate.view(n, -1), normed(s), strict=True)) / n]


def wide_residual(m: Model, s: int, x_0: Tensor, f: list[Tensor], num_streams: int = 3) -> list[Tensor]:
    """X_i <- X_i + 2 sigmoid(b_i) f, h = sum_i sigmoid(a_i) X_i, NVIDIA/Megatron-LM, pull request 6716."""
    x = [x_0] * num_streams
    for i in range(s):
        writes = 2 * torch.sigmoid(m.p[f"connections.{i}.write_logits"])
        x = [x_k + w * f[i] for x_k, w in zip(x, writes, strict=True)]
    return [weighted_sum(list(torch.sigmoid(m.p[f"connections.{s}.read_logits"])), x)]


def altup(m: Model, s: int, x_0: Tensor, f: list[Tensor], num_streams: int = 4) -> list[Tensor]:
    """Predict, update stream 0, correct; arXiv 2301.13310 in the form of Gemma 3n, transformers 5.23.0."""
    n = num_streams

    def resized(i: int, connection: int, x: Tensor, like: Tensor) -> Tensor:
        y = m.p[f"connections.{connection}.proj.{i - 1}.weight"] @ x
        return y * torch.sqrt((like * like).mean() / (y * y).mean().clamp(min=1e-5))

    def routed(layer: int, x: Tensor) -> Tensor:
        own = f"connections.{2 * layer}"
        return torch.tanh(m.p[f"{own}.router"] @ (rms_normed(m, x) * m.p[f"{own}.norm"] / len(x)))

    x = [x_0] + [resized(i, 0, x_0, x_0) for i in range(1, n)]
    for layer in range(m.depth):
        a = (m.p[f"connections.{2 * layer}.predict"] @ routed(layer, x[0])).view(n, n)
        predicted = [x[i] + weighted_sum(list(a[i]), x) for i in range(n)]
        if s < 2 * layer + 2:
            return [predicted[0] + sum(f[2 * layer : s])]
        o = predicted[0] + f[2 * layer] + f[2 * layer + 1]
        gates = 1 + m.p[f"connections.{2 * layer + 1}.correct"] @ routed(layer, o)
        x = [p + gate * (o - predicted[0]) for p, gate in zip(predicted, gates, strict=True)]
    return [(x[0] + sum(resized(i, s, x[i], x[0]) for i in range(1, n))) / n]
