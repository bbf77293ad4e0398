"""The pseudo-code of docs/mechanisms.md computes what the code computes, with random parameters and outputs."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthlm.build import build_model
from depthlm.locations import REPOSITORY
from depthlm.model.attention.context import AttentionContext
from depthlm.model.decoder import Decoder

from ..model.conftest import configuration

SECTIONS = dict(
    re.findall(r"^### (\w+)\n(.*?)(?=^##)", (REPOSITORY / "docs/mechanisms.md").read_text(), re.MULTILINE | re.DOTALL)
)
CODE = {name: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for name, text in SECTIONS.items()}
ATTENTIONS = ("depth_attention", "moda", "shared_kv", "value_residual")
SETTINGS = {
    "attention_residuals": ["model.connection.block_size=3"],
    "attention_residuals_recency": ["model.connection.block_size=3"],
    "depth_attention": ["model.attention.stride=2"],
}
# of the inputs
BATCH, TOKENS, LAYERS = 2, 3, 4


def built(name: str) -> Decoder:
    """Return a decoder of four layers, with random parameters."""
    group = "attention" if name in ATTENTIONS else "connection"
    decoder = build_model(configuration(f"model/{group}={name}", *SETTINGS.get(name, [])))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return decoder.double()


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def run(name: str, decoder: Decoder, **names: Any) -> dict[str, Any]:
    """Run the pseudo-code of a mechanism, and return its variables."""
    (code,) = CODE[name]
    if name == "mhc":
        # after its maps, the code is that of hyper_connections
        code += "\n" + CODE["hyper_connections"][0].partition("\n\n")[2]
    size = decoder.size
    variables = {function: getattr(torch, function) for function in ("stack", "cat", "sigmoid", "tanh", "exp")}
    variables |= {"gelu": torch.nn.functional.gelu, "rms": rms, "sqrt": math.sqrt, "ceil": math.ceil, "inf": math.inf}
    variables |= {"L": LAYERS, "H": size.num_heads, "K": size.num_kv_heads, "d": size.head_size, "t": TOKENS}
    variables |= {"e": size.hidden_size // size.num_heads, "n": 4, "iterations": 20, "block_size": 3, "stride": 2}
    variables |= names
    exec(code, variables)
    return variables


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in ATTENTIONS])
def test_a_connection_reads_what_its_pseudo_code_reads(name):
    decoder = built(name)
    embedding_btd, *outputs = torch.randn(1 + 2 * LAYERS, BATCH, TOKENS, decoder.size.hidden_size, dtype=torch.float64)
    connections = list(decoder.connections)
    inputs: list[Tensor] = []
    state = connections[0].open(embedding_btd)
    for connection, output_btd in zip(connections, outputs, strict=False):
        read, carry = connection.read(state)
        inputs += read
        state = connection.write(state, output_btd, carry)
    hidden_btd = connections[-1].close(state)

    written: list[Tensor] = []

    def sublayer(output_btd: Tensor) -> Callable[..., Tensor]:
        def apply(*read: Tensor) -> Tensor:
            written.extend(read)
            return output_btd

        return apply

    variables = run(
        name, decoder, embedding_btd=embedding_btd, connections=connections, sublayers=[sublayer(f) for f in outputs]
    )
    torch.testing.assert_close(written, inputs)
    torch.testing.assert_close(variables["hidden_btd"], hidden_btd)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_gives_the_context_of_its_pseudo_code(name):
    decoder = built(name)
    size = decoder.size

    def random(heads: int) -> Tensor:
        return torch.randn(BATCH, heads, TOKENS, size.head_size, dtype=torch.float64)

    projected = [(random(size.num_heads), random(size.num_kv_heads), random(size.num_kv_heads)) for _ in range(LAYERS)]
    entries = [(random(size.num_kv_heads), random(size.num_kv_heads)) for _ in range(LAYERS)]
    attentions: list[Any] = [layer.attention for layer in decoder.layers]
    depth = attentions[0].open_depth()
    for attention, qkv, entry in zip(attentions, projected, entries, strict=True):
        own = qkv[:1] if name == "shared_kv" and attention.reuses else qkv
        context, depth = attention.attend(own, depth, AttentionContext())
        if attention is not attentions[-1]:
            depth = attention.after_mlp(entry if name == "moda" else (), depth)

    def per_query(x_bkte: Tensor) -> Tensor:
        return x_bkte.repeat_interleave(size.num_heads // size.num_kv_heads, 1)

    def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, per_query(k), per_query(v), is_causal=True)

    variables = run(
        name,
        decoder,
        project=projected.__getitem__,
        attentions=attentions,
        project_mlp=entries.__getitem__,
        per_query=per_query,
        causal_attention=causal_attention,
        future_ts=torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1),
    )
    torch.testing.assert_close(context, variables["context_bhte"].transpose(1, 2).flatten(2))


def test_every_mechanism_has_pseudo_code():
    assert all(len(code) == 1 for code in CODE.values())
    assert all(4 <= len(code.splitlines()) <= 18 for (code,) in CODE.values())
