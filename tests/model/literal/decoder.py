"""A complete decoder in float64, slow and literal, written from the formulas and not from the code that it checks.

    x_0 = embedding
    f_s = sublayer_s(input_s(x_0, f_0 .. f_(s-1)))
    logits = head(norm(input_2L(x_0, f_0 .. f_(2L-1))))

A connection is the function input_s, computed again from the embedding and the outputs of all earlier sublayers, one
token at a time; an attention is a function of the queries, keys and values of its pass and of all earlier passes.
Gradients come from autograd.

Shapes: b batch, t tokens, v vocabulary. Vectors of one token have no suffix.
"""

from typing import Any

import torch
from torch import Tensor

from depthlm.model.shape import Backbone, Size

from .attentions import ATTENTIONS, Pass
from .connections import CONNECTIONS
from .mixers import delta_attention, latent_heads
from .parts import Model, embed, linear, mlp, norm, normed_heads, plain_heads

Mechanism = tuple[str, dict[str, Any]]


def literal_logits(
    parameters: dict[str, Tensor],
    tokens_bt: Tensor,
    size: Size,
    backbone: Backbone,
    connection: Mechanism = ("residual", {}),
    attention: Mechanism = ("self_attention", {}),
    loops: int = 1,
) -> Tensor:
    """Return logits_btv. parameters: in float64, keyed by their names in the decoder's state_dict."""
    model = Model(parameters, size, backbone, loops)
    return torch.stack([sequence_logits(model, tokens_t.tolist(), connection, attention) for tokens_t in tokens_bt])


def sequence_logits(m: Model, tokens: list[int], connection: Mechanism, attention: Mechanism) -> Tensor:
    """Return logits_tv of one sequence."""
    embeddings = [embed(m, token, t) for t, token in enumerate(tokens)]
    outputs: list[list[Tensor]] = [[] for _ in tokens]

    def inputs_of(t: int, sublayer: int) -> list[Tensor]:
        name, settings = connection
        return CONNECTIONS[name](m, sublayer, embeddings[t], outputs[t], **settings)

    passes: list[Pass] = []
    for position in range(m.depth):
        layer = position % m.size.num_layers

        inputs = [inputs_of(t, 2 * position) for t in range(len(tokens))]
        name, settings = attention
        if m.mixer(layer) == "delta":
            now, contexts = (
                Pass(layer),
                delta_attention(m, f"layers.{layer}.attention", normed_inputs(m, layer, inputs)),
            )
        else:
            now = project(m, layer, inputs)
            contexts = ATTENTIONS[name](m, now, passes, **settings)
        for t in range(len(tokens)):
            output = linear(m, f"layers.{layer}.attention.o_proj", torch.cat(contexts[t]))
            outputs[t].append(post_norm(m, f"layers.{layer}.attention_norm", output))

        for t in range(len(tokens)):
            (x,) = pre_norm(m, f"layers.{layer}.mlp_norm", inputs_of(t, 2 * position + 1))
            now.mlp_inputs.append(x)
            outputs[t].append(post_norm(m, f"layers.{layer}.mlp_norm", mlp(m, f"layers.{layer}.mlp", x)))
        if m.mixer(layer) != "delta":
            passes.append(now)

    return torch.stack([head(m, inputs_of(t, 2 * m.depth)[0]) for t in range(len(tokens))])


def normed_inputs(m: Model, layer: int, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return the inputs of q, k and v at each token."""
    normed = [pre_norm(m, f"layers.{layer}.attention_norm", one) for one in inputs]
    return [one if len(one) == 3 else one * 3 for one in normed]


def project(m: Model, layer: int, inputs: list[list[Tensor]]) -> Pass:
    """Return queries, keys and values of one pass through a layer. inputs: one per token, or three for q, k and v."""
    now = Pass(layer, m.attending.index(layer))
    name = f"layers.{layer}.attention"
    # a layer that reuses keys and values has only queries
    for t, (q_in, k_in, v_in) in enumerate(normed_inputs(m, layer, inputs)):
        if m.mixer(layer) == "latent" and f"{name}.kv_a_proj.weight" not in m.p:
            width = m.size.head_size + m.size.width_of_shared_key()
            q, k, v = list(linear(m, f"{name}.q_proj", q_in).split(width)), [], []
        elif m.mixer(layer) == "latent":
            q, k, v = latent_heads(m, name, q_in, k_in, v_in)
        elif f"{name}.k_proj.weight" not in m.p:
            q, k, v = normed_heads(m, f"{name}.q_proj", f"{name}.q_norm", q_in, t), [], []
        else:
            q = normed_heads(m, f"{name}.q_proj", f"{name}.q_norm", q_in, t)
            k = normed_heads(m, f"{name}.k_proj", f"{name}.k_norm", k_in, t)
            v = plain_heads(m, f"{name}.v_proj", v_in)
        now.q.append(q)
        now.k.append(k)
        now.v.append(v)
        now.k_inputs.append(k_in)
        now.v_inputs.append(v_in)
    return now


def pre_norm(m: Model, name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Normalize the inputs of f(norm(x)). If there are three inputs, each has its own norm."""
    if m.backbone.norm_placement not in ("pre", "both"):
        return inputs
    if f"{name}.weight" in m.p:
        # a layer that reuses keys and values reads only the input of q
        return [norm(m, name, inputs[0])]
    # a layer of which another loop has three inputs
    inputs = inputs if len(inputs) == 3 else inputs * 3
    return [norm(m, f"{name}.{i}", x) for i, x in enumerate(inputs)]


def post_norm(m: Model, name: str, output: Tensor) -> Tensor:
    """Return norm(f(x)), before anything else uses the output."""
    if m.backbone.norm_placement == "both":
        return norm(m, name.replace("_norm", "_post_norm"), output)
    return norm(m, name, output) if m.backbone.norm_placement == "post" else output


def head(m: Model, hidden: Tensor) -> Tensor:
    matrix = m.p["embedding.weight"] if m.backbone.tie_embeddings else m.p["head.weight"]
    logits = matrix @ norm(m, "final_norm", hidden)
    return logits + m.p["head.bias"] if m.backbone.head_bias else logits
