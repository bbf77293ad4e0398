"""Latent attention (arXiv 2405.04434) and Kimi Delta Attention (arXiv 2510.26692), one token and one head at a time."""

import torch
from torch import Tensor

from .parts import Model, linear, rms_normed

Heads = list[list[Tensor]]


def latent_heads(m: Model, name: str, q_in: Tensor, k_in: Tensor, v_in: Tensor) -> tuple[list[Tensor], ...]:
    """Queries, keys and values of one token, by head. Keys end in a part that all heads share."""
    width, latent = m.size.head_size, m.size.width_of_latent()
    queries = list(linear(m, f"{name}.q_proj", q_in).split(width + m.size.width_of_shared_key()))
    keys, values = [], []
    for h in range(m.size.num_heads):
        from_k, from_v = (
            linear(m, f"{name}.kv_b_proj", latent_norm(m, name, linear(m, f"{name}.kv_a_proj", x)[:latent]))
            for x in (k_in, v_in)
        )
        shared = linear(m, f"{name}.kv_a_proj", k_in)[latent:]
        start = 2 * width * h
        keys.append(torch.cat((from_k[start : start + width], shared)))
        values.append(from_v[start + width : start + 2 * width])
    return queries, keys, values


def latent_norm(m: Model, name: str, x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * m.p[f"{name}.kv_a_norm.weight"]


def delta_attention(m: Model, name: str, inputs: list[list[Tensor]]) -> Heads:
    """S = Diag(a) S + beta k (v - k^T Diag(a) S);   o = S^T q / sqrt(e);   out = norm(o) * sigmoid(gate)"""
    e, steps = m.size.head_size, len(inputs)
    q_in, k_in, v_in = ([one[i] for one in inputs] for i in range(3))
    queries, keys, values = (convolved(m, name, kind, xs) for kind, xs in (("q", q_in), ("k", k_in), ("v", v_in)))
    contexts: Heads = [[] for _ in range(steps)]
    for h in range(m.size.num_heads):
        state = torch.zeros(e, e, dtype=torch.float64)
        for t in range(steps):
            forget = linear(m, f"{name}.f_b_proj", linear(m, f"{name}.f_a_proj", k_in[t])) + m.p[f"{name}.dt_bias"]
            rate = torch.exp(m.p[f"{name}.A_log"][h])
            decay = torch.exp(-rate * torch.log1p(torch.exp(forget[h * e : (h + 1) * e])))
            beta = torch.sigmoid(linear(m, f"{name}.b_proj", k_in[t])[h])
            q, k, v = normalized(queries[t][h]), normalized(keys[t][h]), values[t][h]
            state = decay[:, None] * state
            state = state + beta * torch.outer(k, v - k @ state)
            gate = linear(m, f"{name}.g_b_proj", linear(m, f"{name}.g_a_proj", q_in[t]))[h * e : (h + 1) * e]
            out = rms_normed(m, q @ state / e**0.5) * m.p[f"{name}.o_norm.weight"]
            contexts[t].append(out * torch.sigmoid(gate))
    return contexts


def convolved(m: Model, name: str, kind: str, xs: list[Tensor]) -> Heads:
    """silu(sum_i w_i x_(t-3+i)) at each token, by head"""
    projected, weight = [linear(m, f"{name}.{kind}_proj", x) for x in xs], m.p[f"{name}.{kind}_conv1d.weight"]
    heads = []
    for t in range(len(xs)):
        total = sum(weight[:, i] * projected[t - 3 + i] for i in range(4) if t - 3 + i >= 0)
        heads.append(list((total * torch.sigmoid(total)).split(m.size.head_size)))
    return heads


def normalized(x: Tensor) -> Tensor:
    return x / torch.sqrt(x @ x + 1e-6)
