"""Connections: input_s as a function of the embedding and of the outputs of all earlier sublayers, for one token.

Every function has the arguments

    m: the model.   s: the sublayer, 0 to 2L - 1, or 2L for the read before the final norm.
    x_0: the embedding.   f: the outputs of sublayers 0 .. s - 1, normed on a post-norm backbone.

and gives the inputs of sublayer s before its norm: one, or three for q, k and v. Each starts from x_0 again.
"""

import math

import torch
from torch import Tensor

from .parts import Model, linear, norm, rms_normed, softmax, weighted_sum
from .streams import altup, hyper_connections, mhc, qwen4_exp, wide_residual


def residual(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """h <- h + f(h), arXiv 1512.03385"""
    return [sum(f, x_0)]


def denseformer(m: Model, s: int, x_0: Tensor, f: list[Tensor], period: int = 1, dilation: int = 1) -> list[Tensor]:
    """Y_i = sum_{j <= i} a_ij X_j, arXiv 2402.02622; X_i is block i of Y_(i-1), Y_0 = X_0."""
    x, y = [x_0], x_0
    for i in range(1, s // 2 + 1):
        x.append(y + f[2 * i - 2] + f[2 * i - 1])
        y = x[i]
        if i % period == 0:
            kept = [x[j] for j in range(i + 1) if (i - j) % dilation == 0]
            y = weighted_sum(list(m.p[f"connections.{2 * i - 1}.a"]), kept)
    return [y if s % 2 == 0 else y + f[s - 1]]


def gated(m: Model, s: int, x_0: Tensor, f: list[Tensor], start: str, inputs: list[Tensor]) -> list[Tensor]:
    """With start=identity, (1 - g) x + g h of each input h, where x is the embedding plus all outputs."""
    if start == "paper":
        return inputs
    gates = list(m.p[f"connections.{s}.gate"])
    return [(1 - g) * sum(f, x_0) + g * h for g, h in zip(gates, inputs, strict=True)]


def attention_residuals(
    m: Model,
    s: int,
    x_0: Tensor,
    f: list[Tensor],
    block_size: int | None = None,
    query: str = "static",
    mixing: str = "softmax",
    key_norm: str = "weighted",
    values: str = "raw",
    scale: bool = False,
    window: int | None = None,
    heads: int = 1,
    separate_qkv: int | list[int] | None = None,
    start: str = "paper",
    norm_eps: float | None = None,
    routing: str = "replace",
) -> list[Tensor]:
    """h = sum_j alpha_j b_j, alpha = softmax_j(w . RMSNorm(b_j)), arXiv 2603.15031.

    b_0 is the embedding, b_n the sum of the outputs of block n. The current block counts with its outputs so far.
    Inkling 2: the values are normalized too, and q, k and v have queries of their own in some layers. Delta Attention
    Residuals, arXiv 2605.18855: the input is the embedding plus all outputs, plus h; the first and the last lack h.
    """
    if routing == "additive":
        settings = block_size, query, mixing, key_norm, values, scale, window, heads, separate_qkv
        plain = s in (0, 2 * m.depth)
        inputs = (
            attention_residuals(m, s, x_0, f, *settings, norm_eps=norm_eps) if not plain else [torch.zeros_like(x_0)]
        )
        return [sum(f, x_0) + h for h in inputs]
    layer, apart = s // 2, separate_qkv or []
    apart = list(range(apart - 1, m.depth, apart)) if isinstance(apart, int) else apart
    reads = 3 if s % 2 == 0 and layer in apart else 1
    if values == "normed" and s == 0:
        return [x_0] * reads
    block_size = block_size or math.ceil(2 * m.depth / 8)
    b = [x_0] + [sum(f[start : start + block_size]) for start in range(0, s, block_size)]
    if window is not None:
        b = b[:1] + b[1:][-window:]
    own = f"connections.{s}"
    if mixing == "scalars":
        return gated(m, s, x_0, f, start, [weighted_sum(softmax(list(m.p[f"{own}.scores"])), b)])
    normed = [rms_normed(m, b_j, norm_eps) for b_j in b]
    inputs = []
    for read in range(reads):
        w = m.p[f"{own}.query"] if query == "static" else m.p[f"{own}.query_proj.weight"] @ b[-1]
        keys = b if key_norm == "none" else normed
        if key_norm == "weighted":
            weight = m.p[f"{own}.key_norm"]
            keys = [(weight[read] if reads == 3 else weight) * key for key in keys]
        w = w[read] if reads == 3 else w
        if heads > 1:
            slices = []
            for part, *parts in zip(*(x.chunk(heads) for x in (w, *keys, *b)), strict=True):
                factor = math.ceil(len(w) / heads) ** -0.5 if scale else 1
                scores = [factor * torch.dot(part, key) for key in parts[: len(b)]]
                alpha = softmax(scores) if mixing == "softmax" else [torch.sigmoid(score) for score in scores]
                slices.append(weighted_sum(alpha, parts[len(b) :]))
            return gated(m, s, x_0, f, start, [torch.cat(slices)])
        scores = [torch.dot(w, key) / (math.sqrt(len(w)) if scale else 1) for key in keys]
        alpha = softmax(scores) if mixing == "softmax" else [torch.sigmoid(score) for score in scores]
        inputs.append(weighted_sum(alpha, normed if values == "normed" else b))
    return gated(m, s, x_0, f, start, inputs)


def attention_residuals_recency(
    m: Model, s: int, x_0: Tensor, f: list[Tensor], block_size: int | None = None, start: str = "paper"
) -> list[Tensor]:
    """Attention Residuals over the embedding, snapshots of the running sum, and the sum itself with a learned bonus.

    A layer ends with a snapshot if at least block_size sublayers were added since the last one.
    """
    block_size = block_size or math.ceil(2 * m.depth / 8)
    running, snapshots, added = x_0, [], 0
    for i in range(s):
        running, added = running + f[i], added + 1
        if i % 2 == 1 and added >= block_size:
            snapshots.append(running)
            added = 0
    b = [x_0, *snapshots, running]
    own = f"connections.{s}"
    scores = [torch.dot(m.p[f"{own}.query"], rms_normed(m, b_j) * m.p[f"{own}.key_norm"]) for b_j in b]
    scores[-1] = scores[-1] + m.p[f"{own}.recency"][0]
    return gated(m, s, x_0, f, start, [weighted_sum(softmax(scores), b)])


def dca(
    m: Model,
    s: int,
    x_0: Tensor,
    f: list[Tensor],
    version: int = 3,
    last_k: int | None = None,
    own_embedding: bool = True,
    gate: str = "relu_of_sum",
    w: str = "per_source",
    separate_qkv: bool = True,
) -> list[Tensor]:
    """g = sum_j gate_j * G_j, arXiv 2502.06785, section 3.1; DCA has three of them, the inputs of q, k and v.

    G = [embedding, output of block 1, ...], where the output of a block is attention output + MLP output.
    """
    blocks = [f[2 * i] + f[2 * i + 1] for i in range(s // 2)]
    stack = [x_0, *blocks]
    first = 1 if own_embedding else 0
    if last_k is not None and len(stack) > first + last_k:
        stack = [*stack[:first], sum(stack[first:-last_k]), *stack[-last_k:]]
    # the MLP of a block reads the same stack as its attention, with the same parameters
    own = f"connections.{s - s % 2}"

    def gate_of(read: int, j: int) -> Tensor:
        b = m.p[f"{own}.b"][read, j]
        if version < 3:
            return b
        w_j = m.p[f"{own}.w"][read, j if w == "per_source" else 0]
        score = torch.dot(w_j, stack[j])
        return (b + score).clamp(min=0) if gate == "relu_of_sum" else b + score.clamp(min=0)

    def g(read: int) -> Tensor:
        return weighted_sum([gate_of(read, j) for j in range(len(stack))], stack)

    if s % 2 == 1:
        return [f[s - 1] + g(0)]
    return [g(read) for read in range(3 if separate_qkv and s < 2 * m.depth else 1)]


def gated_residual(
    m: Model, s: int, x_0: Tensor, f: list[Tensor], form: str = "channel", temperature: float = 0.3
) -> list[Tensor]:
    """h <- alpha h + beta f(h), alpha^2 + beta^2 = 1, transformers 5.23.0; token: h <- h + g f(h), prime-rl."""
    h = x_0
    for i in range(s):
        if form == "token":
            w, c, b = (m.p[f"connections.{i}.{name}"] for name in "wcb")
            h = weighted_sum([torch.ones(()), 2 * torch.sigmoid(c * torch.dot(w, rms_normed(m, h)) + b)], [h, f[i]])
            continue
        beta = torch.sigmoid(m.p[f"connections.{i}.gate"] / temperature)
        h = torch.sqrt((1 - beta**2).clamp(min=1e-3)) * h + beta * f[i]
    return [h]


def laurel(
    m: Model, s: int, x_0: Tensor, f: list[Tensor], variant: str = "pa", rank: int = 8, last_k: int = 3
) -> list[Tensor]:
    """rw: alpha f + beta x.   lr: f + B A x + x.   pa: f + x + sum_j gamma_j B A x_(i-j)."""
    x = [x_0]
    for i in range(s):
        own = f"connections.{i}"
        if variant == "rw":
            x.append(m.p[f"{own}.alpha"][0] * f[i] + m.p[f"{own}.beta"][0] * x[i])
            continue
        y = f[i] + x[i]
        if variant == "lr":
            y = y + m.p[f"{own}.up"] @ (m.p[f"{own}.down"] @ x[i])
        else:
            for j in range(min(last_k, i + 1)):
                y = y + m.p[f"{own}.gamma"][j] * (m.p[f"{own}.up"] @ (m.p[f"{own}.down"] @ x[i - j]))
        x.append(y)
    return [x[s]]


def rezero(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """h <- h + alpha f(h), arXiv 2003.04887"""
    return [x_0 + sum(m.p[f"connections.{i}.alpha"][0] * f[i] for i in range(s))]


def highway(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """h <- (1 - g) * h + g * f(h), g = sigmoid(W h + b), arXiv 1505.00387"""
    h = x_0
    for i in range(s):
        g = torch.sigmoid(linear(m, f"connections.{i}.gate", h))
        h = weighted_sum([1 - g, g], [h, f[i]])
    return [h]


def depth_dense(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """A linear projection of the concatenated embedding and outputs, arXiv 2603.15619, section 2.2."""
    return [linear(m, f"connections.{s}.proj", torch.cat([x_0, *f[:s]]))]


def depth_qkv(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """Attention(Q_s, {K_0 .. K_s}, {V_0 .. V_s}) over depth, head by head, arXiv 2603.15619, section 2.2."""
    x = [x_0, *f[:s]]
    heads, e = m.size.num_heads, m.size.hidden_size // m.size.num_heads
    queries = linear(m, f"connections.{s}.q_proj", x[s]).split(e)
    keys = [linear(m, f"connections.{j}.k_proj", x[j]).split(e) for j in range(s + 1)]
    values = [linear(m, f"connections.{j}.v_proj", x[j]).split(e) for j in range(s + 1)]
    contexts = []
    for head in range(heads):
        group = head // (heads // m.size.num_kv_heads)
        scores = [torch.dot(queries[head], key[group]) / math.sqrt(e) for key in keys]
        contexts.append(weighted_sum(softmax(scores), [value[group] for value in values]))
    return [torch.cat(contexts)]


def mrla(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """h = sum_j (sigmoid(q of the newest output) . sigmoid(k_j) / e) v_j, arXiv 2603.15031, Table 5."""
    if s == 0:
        return [x_0]
    query = torch.sigmoid(linear(m, f"connections.{s}.q_proj", f[s - 1]))
    weights = []
    for j in range(1, s + 1):
        key = torch.sigmoid(linear(m, f"connections.{j}.k_proj", f[j - 1]))
        weights.append(torch.dot(query, key) / m.size.head_size * m.p[f"connections.{j}.c"])
    return [weighted_sum(weights, f[:s])]


def embedding_skip(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """h <- a_l h + b_l x_0 before layer l"""
    h = x_0
    for i in range(s + 1):
        if i % 2 == 0 and i < 2 * m.depth:
            a, b = m.p[f"connections.{i}.weight"]
            h = a * h + b * x_0
        if i < s:
            h = h + f[i]
    return [h]


def unet_skip(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """h <- h + c X_l before the layer that as many layers follow as precede layer l."""
    h, x = x_0, [x_0]
    for i in range(s + 1):
        layer = i // 2
        if i % 2 == 0 and i < 2 * m.depth and layer >= math.ceil(m.depth / 2):
            h = h + m.p[f"connections.{i}.c"][0] * x[m.depth - layer]
        if i < s:
            h = h + f[i]
        if i % 2 == 1:
            x.append(h)
    return [h]


def backout(
    m: Model, s: int, x_0: Tensor, f: list[Tensor], layer: int | None = None, start: float = 0.5
) -> list[Tensor]:
    """hidden = h - lambda X, with the output X of a layer"""
    if s < 2 * m.depth:
        return [sum(f, x_0)]
    last = 2 * m.depth // 3 if layer is None else layer
    return [sum(f, x_0) - m.p[f"connections.{s}.weight"][0] * sum(f[: 2 * last + 2], x_0)]


def layer_scale(
    m: Model, s: int, x_0: Tensor, f: list[Tensor], start: float | None = None, form: str = "output"
) -> list[Tensor]:
    """h <- h + diag(lambda) f(h), arXiv 2103.17239; affine: h <- (h + b_0) s_0 + (f(h) + b_1) s_1, ZAYA1"""
    h = x_0
    for i in range(s):
        if form == "affine":
            skip_scale, skip_bias, bias = (
                m.p[f"connections.{i}.{name}"] for name in ("skip_scale", "skip_bias", "bias")
            )
            h = skip_scale * (h + skip_bias) + m.p[f"connections.{i}.scale"] * (f[i] + bias)
        else:
            h = h + m.p[f"connections.{i}.scale"] * f[i]
    return [h]


def deepnorm(m: Model, s: int, x_0: Tensor, f: list[Tensor], form: str = "deepnorm") -> list[Tensor]:
    """h <- Norm(alpha h + f(h)), arXiv 2203.00555 and 2601.19895; the last norm is that before the head."""
    alpha = {"keel": 2 * m.depth, "deepnorm": (2 * m.depth) ** 0.25, "deeploop": (2 * m.depth) ** 0.5}[form]
    h = x_0
    for i in range(s):
        if form == "keel" and i < 2:  # its first two sublayers are pre-norm
            h = h + f[i]
            continue
        total = alpha * h + f[i]
        h = norm(m, f"connections.{i + 1}.norm", total) if i + 1 < 2 * m.depth else total
    return [h]


def siamese_norm(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """u <- Norm(u), the input is u + Norm(p), u <- u + f / sqrt(2 l), p <- p + f, arXiv 2602.08064"""
    u, p = x_0, x_0
    for i in range(s):
        u = norm(m, f"connections.{i}.norm_u", u) + f[i] / math.sqrt(2 * (i // 2 + 1))
        p = p + f[i]
    return [norm(m, f"connections.{s}.norm_u", u) + norm(m, f"connections.{s}.norm_p", p)]


def ddl(m: Model, s: int, x_0: Tensor, f: list[Tensor]) -> list[Tensor]:
    """h <- h + beta k (v - k . h), arXiv 2601.00417, with values of width 1"""
    h = x_0
    for i in range(s):
        beta = 2 * torch.sigmoid(linear(m, f"connections.{i}.beta", rms_normed(m, h)))
        v = 4 * torch.sigmoid(linear(m, f"connections.{i}.value", h))
        k = f[i] / torch.sqrt(torch.dot(f[i], f[i]) + 1e-10)
        h = h + beta * (v - torch.dot(k, h)) * k
    return [h]


def mudd(
    m: Model,
    s: int,
    x_0: Tensor,
    f: list[Tensor],
    layers: int | None = None,
    sources: list[int] | int | None = None,
) -> list[Tensor]:
    """A = GELU(RMSNorm(X_i) W_1) W_2 + a; x_c = sum_j A_cj X_j for q, k, v and the residual, arXiv 2502.12170"""

    first = 1 if layers is None else max(1, m.depth - layers)

    def sums(i: int) -> list[Tensor]:
        if i < first:
            return [x[i]] * 4
        every = range(sources - 1, i, sources) if isinstance(sources, int) else range(i) if sources is None else sources
        read = [x[j] for j in range(i + 1) if j in every or j == i]
        own = f"connections.{2 * i}"
        low = m.p[f"{own}.w_1.weight"] @ rms_normed(m, x[i])
        low = 0.5 * low * (1 + torch.erf(low / math.sqrt(2)))
        weights = (m.p[f"{own}.w_2.weight"] @ low).view(m.p[f"{own}.a"].shape) + m.p[f"{own}.a"]
        return [weighted_sum(list(row), read) for row in weights]

    x = [x_0]
    for i in range(s // 2):
        x.append(sums(i)[-1] + f[2 * i] + f[2 * i + 1])
    layer = s // 2
    if s % 2 == 1:
        return [sums(layer)[-1] + f[s - 1]]
    return sums(layer)[: 1 if layer < first else 3]


CONNECTIONS = {
    "embedding_skip": embedding_skip,
    "unet_skip": unet_skip,
    "layer_scale": layer_scale,
    "deepnorm": deepnorm,
    "siamese_norm": siamese_norm,
    "ddl": ddl,
    "mudd": mudd,
    "residual": residual,
    "denseformer": denseformer,
    "attention_residuals": attention_residuals,
    "attention_residuals_recency": attention_residuals_recency,
    "dca": dca,
    "hyper_connections": hyper_connections,
    "mhc": mhc,
    "qwen4_exp": qwen4_exp,
    "wide_residual": wide_residual,
    "altup": altup,
    "backout": backout,
    "gated_residual": gated_residual,
    "laurel": laurel,
    "rezero": rezero,
    "highway": highway,
    "depth_dense": depth_dense,
    "depth_qkv": depth_qkv,
    "mrla": mrla,
}
