"""Attentions, one token and one head at a time.

q[t][h], k[t][g], v[t][g] are vectors of width e: t token, h query head, g key/value head, G query heads per g.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .parts import Model, linear, normed_heads, plain_heads, softmax, weighted_sum

Heads = list[list[Tensor]]


@dataclass
class Pass:
    """One pass through a layer. With loops a layer has several passes.

    place: the index of the layer. layer: its index among the layers with keys and values.
    """

    place: int
    layer: int = 0
    q: Heads = field(default_factory=list)
    k: Heads = field(default_factory=list)
    v: Heads = field(default_factory=list)
    k_inputs: list[Tensor] = field(default_factory=list)
    v_inputs: list[Tensor] = field(default_factory=list)
    mlp_inputs: list[Tensor] = field(default_factory=list)
    # what depth_attention passes to later layers: the keys and values of its attention over the sequence
    k_seen: Heads = field(default_factory=list)
    v_seen: Heads = field(default_factory=list)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """softmax_s(q . k_s / sqrt(e)) v_s"""
    weights = softmax([torch.dot(q, key) / math.sqrt(len(q)) for key in keys])
    return weighted_sum(weights, values)


def causal(m: Model, q: Heads, k: Heads, v: Heads, extra: Callable | None = None) -> Heads:
    """Attend with each query head to all tokens up to its own. extra(t, g): more entries of the same softmax."""
    group = len(q[0]) // len(k[0])
    contexts = []
    for t in range(len(q)):
        contexts.append([])
        for h in range(m.size.num_heads):
            g = h // group
            more = extra(t, g) if extra else []
            keys = [k[s][g] for s in range(t + 1)] + [key for key, _ in more]
            values = [v[s][g] for s in range(t + 1)] + [value for _, value in more]
            contexts[t].append(attend(q[t][h], keys, values))
    return contexts


def self_attention(m: Model, now: Pass, before: list[Pass]) -> Heads:
    return causal(m, now.q, now.k, now.v)


def depth_attention(
    m: Model,
    now: Pass,
    before: list[Pass],
    stride: int | None = None,
    sources: str = "anchored",
    mixing: str = "softmax",
    mixes: str = "value",
    start: str = "paper",
) -> Heads:
    """arXiv 2606.05014, equations 2 to 4.

    alpha_j = softmax_j(qbar . k_j / sqrt(e));   vmix = alpha_self v + sum_j alpha_j vmix_j

    With start=identity, (1 - g) v + g vmix, with a g for each key/value head.
    """
    layers, group = len(m.attending), len(now.q[0]) // len(now.k[0])
    stride = stride or max(1, layers // 2)
    first = len(before) // layers * layers
    this_loop = before[first:]
    if sources == "anchored":
        chosen = [j for j in range(now.layer) if j % stride == 0]
    else:
        chosen = [j for j in range(now.layer) if (now.layer - j) % stride == 0]
    # from the earlier loops: the same layer
    others = [this_loop[j] for j in chosen] + [one for one in before[:first] if one.layer == now.layer]

    for t in range(len(now.q)):
        now.k_seen.append([])
        now.v_seen.append([])
        for g in range(len(now.k[t])):
            own_k, own_v = now.k[t][g], now.v[t][g]
            keys = [other.k_seen[t][g] for other in others] + [own_k]
            values = [other.v_seen[t][g] for other in others] + [own_v]
            qbar = sum(now.q[t][g * group : (g + 1) * group]) / group
            if mixing == "uniform":
                alpha = [torch.tensor(1 / len(keys), dtype=own_k.dtype)] * len(keys)
            else:
                alpha = softmax([torch.dot(qbar, key) / math.sqrt(len(key)) for key in keys])
            if start == "identity" and others:
                gate = m.p[f"layers.{now.place}.attention.gate"][g]
                alpha = [gate * one for one in alpha]
                alpha[-1] = alpha[-1] + 1 - gate
            now.k_seen[t].append(own_k if mixes == "value" else weighted_sum(alpha, keys))
            now.v_seen[t].append(own_v if mixes == "key" else weighted_sum(alpha, values))
    return causal(m, now.q, now.k_seen, now.v_seen)


def moda(
    m: Model,
    now: Pass,
    before: list[Pass],
    depth_kv: bool = True,
    ffn_kv: bool = True,
    attn_kv: bool = False,
    last_layer_kv: bool = False,
    slots: int | None = None,
    start: str = "paper",
) -> Heads:
    """arXiv 2603.15619: one softmax over all tokens so far and over the depth entries of the current token.

    With start=identity, (1 - g) x + g of it, with a g for each query head and x from the tokens alone.
    """

    def projected(layer: int, kind: str, k_in: Tensor, v_in: Tensor, t: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return projected keys and values. Keys get the layer's K-norm, and RoPE at their position."""
        name = f"layers.{layer}.attention"
        if m.mixer(layer) == "latent":
            width = m.size.head_size + m.size.width_of_shared_key()
            return list(linear(m, f"{name}.{kind}_k_proj", k_in).split(width)), plain_heads(
                m, f"{name}.{kind}_v_proj", v_in
            )
        keys = normed_heads(m, f"{name}.{kind}_k_proj", f"{name}.k_norm", k_in, t)
        return keys, plain_heads(m, f"{name}.{kind}_v_proj", v_in)

    def entries_of(t: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return keys and values, by head, of all earlier sublayers, oldest first."""
        found = []
        for one in before:
            owns_projections = one.layer < len(m.attending) - 1 or last_layer_kv or m.loops > 1
            if attn_kv:
                assert owns_projections
                found.append(projected(one.place, "attn", one.k_inputs[t], one.v_inputs[t], t))
            elif depth_kv:
                found.append((one.k[t], one.v[t]))
            if ffn_kv and owns_projections:
                found.append(projected(one.place, "ffn", one.mlp_inputs[t], one.mlp_inputs[t], t))
        return found if slots is None else found[max(0, len(found) - slots) :]

    entries = [entries_of(t) for t in range(len(now.q))]
    contexts = causal(m, now.q, now.k, now.v, lambda t, g: [(keys[g], values[g]) for keys, values in entries[t]])
    if start == "paper" or not entries[0]:
        return contexts
    gates = m.p[f"layers.{now.place}.attention.gate"]
    alone = causal(m, now.q, now.k, now.v)
    return [
        [(1 - g) * x + g * o for g, x, o in zip(gates, *heads, strict=True)]
        for heads in zip(alone, contexts, strict=True)
    ]


def value_residual(m: Model, now: Pass, before: list[Pass], weights: str = "learned") -> Heads:
    """v <- a v + b v_0, arXiv 2410.17897"""
    if before:
        learned = m.p.get(f"layers.{now.place}.attention.value_weights")
        a, b = (0.5, 0.5) if weights == "fixed" else learned
        mixed = [
            [a * v + b * v_0 for v, v_0 in zip(*heads, strict=True)] for heads in zip(now.v, before[0].v, strict=True)
        ]
        return causal(m, now.q, now.k, mixed)
    return causal(m, now.q, now.k, now.v)


def shared_kv(m: Model, now: Pass, before: list[Pass], reuse: str = "every_second", last_k: int | None = None) -> Heads:
    """Some layers attend to the keys and values of an earlier layer of the same loop."""
    layers = len(m.attending)
    if reuse == "every_second":
        source = now.layer // 2 * 2
    elif reuse == "upper_half":
        source = min(now.layer, math.ceil(layers / 2) - 1)
    else:
        source = min(now.layer, max(1, layers - (last_k or max(1, 3 * layers // 7))) - 1)
    kept = now if source == now.layer else before[len(before) // layers * layers + source]
    return causal(m, now.q, kept.k, kept.v)


ATTENTIONS = {
    "self_attention": self_attention,
    "depth_attention": depth_attention,
    "moda": moda,
    "value_residual": value_residual,
    "shared_kv": shared_kv,
}
