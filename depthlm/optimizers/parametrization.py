"""Parametrizations: how initial values, rates, decay and epsilon follow from width and depth, so that rates transfer.

m_D = D / D_base is the ratio of the hidden sizes, m_L = L / L_base that of the layers, m = fan_in / fan_in_base that of
a matrix, and e the width of a head. The factors are relative to those of the base size, where all are 1.

    muP (arXiv 2203.03466):                  matrices: std / sqrt(m), rate / m;  logits / m_D;  scores sqrt(e_base / e)
    CompleteP (arXiv 2505.01618, alpha 1):   also outputs of sublayers / m_L, decay of matrices m, epsilon / (m_D m_L)

Where a read does not add up all outputs, the number of those that it adds up takes the place of L in their factor
(`summed_outputs`). A factor c of the result of a parameter w is part of w: it starts as c w, with rate c, and with
decay and epsilon 1 / c. With an optimizer whose updates do not depend on the scale of gradients, such as AdamW, that is
the same as a factor in the model, and costs nothing. So the factors equal those of the released code of CompleteP
(github.com/EleutherAI/nanoGPT-mup).

A module declares those of its own and its children's parameters whose rate follows the width unlike that of a matrix,
as m to a negative power: 1 for a vector over which a product sums, 2 for a matrix whose result another product sums.

    width_exponents = {"query": 1.0, "query_proj.weight": 2.0}

In the same way, CompleteP takes m_L to a negative power for the rate of a parameter whose effect each layer adds to the
hidden state beside the outputs, such as a learned factor of the residual stream:

    depth_exponents = {"weight": 1.0}
"""

import re
from collections.abc import Iterator
from typing import Literal

from torch import nn

from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.connection import Connection
from depthlm.model.decoder import Decoder
from depthlm.model.parameters import Factors, kind_of, owned_parameters

# the last norm of a sublayer, which its output includes
OUTPUTS = {"post": "(attention|mlp)_norm", "both": "(attention|mlp)_post_norm"}


def parametrize(model: Decoder, base: Decoder, name: Literal["mup", "completep"], first: Connection) -> None:
    """Give a model the factors of its parameters, by name, as `model.factors`.

    base: a model with the widths of the base size, but as many layers. first: the first connection of the base size.

    Raises ValueError if CompleteP is not defined for the connections (see `Connection.accumulates`).
    """
    complete = name == "completep"
    width = model.size.hidden_size / base.size.hidden_size
    depth = model.connections[0].spec.num_layers / first.spec.num_layers if complete else 1.0
    summed = summed_outputs(first) / summed_outputs(model.connections[0]) if complete else 1.0
    outputs = dict(_output_factors(model, base, width, summed))
    eps = 1 / (width * depth) if complete else 1.0
    exponents, of_depth = _declared(model, "width_exponents"), _declared(model, "depth_exponents")
    model.factors = {}
    for owned, of_base in zip(owned_parameters(model), owned_parameters(base), strict=True):
        is_matrix = kind_of(owned) in ("matrix", "experts")
        exponent = exponents.get(owned.name, 1.0 if is_matrix else 0.0)
        m = owned.parameter.shape[-1] / of_base.parameter.shape[-1] if exponent else 1.0
        factors = Factors(m**-0.5, 1 / m, m if complete else 1.0, eps).scaled(m ** (1 - exponent))
        factors = factors._replace(lr=factors.lr * depth ** -of_depth.get(owned.name, 0.0))
        module = owned.name.rpartition(".")[0]
        # the stacked matrices of experts are parameters of one module
        model.factors[owned.name] = factors.scaled(outputs.get(module, outputs.get(owned.name, 1.0)))


def _declared(model: nn.Module, attribute: str) -> dict[str, float]:
    """Return the exponents that modules declare, by the names of the parameters."""
    return {
        f"{path}.{name}": exponent
        for path, module in model.named_modules()
        for name, exponent in getattr(module, attribute, {}).items()
    }


def summed_outputs(connection: Connection) -> int:
    """Return how many outputs of sublayers a read of a connection adds up. Raises ValueError if that is not defined."""
    rule = connection.accumulates
    if rule == "sum":
        return 2 * connection.spec.num_layers
    if isinstance(rule, str):
        raise ValueError(f"not defined for {type(connection).__name__}: {rule}")
    return rule


def _output_factors(model: Decoder, base: Decoder, width: float, outputs: float) -> Iterator[tuple[str, float]]:
    """Yield the modules, or parameters, that include a factor of their output, and the factor.

    outputs: the factor of the outputs of sublayers.
    """
    yield "final_norm", 1 / width
    for i, (layer, of_base) in enumerate(zip(model.layers, base.layers, strict=True)):
        attention, before = layer.attention, of_base.attention
        if isinstance(attention, SelfAttention) and isinstance(before, SelfAttention):
            last = "q_norm" if hasattr(attention, "q_norm") else "q_proj"
            yield f"layers.{i}.attention.{last}", (before.key_size / attention.key_size) ** 0.5
    if outputs == 1.0:
        return
    names = OUTPUTS.get(model.backbone.norm_placement, r"(attention\.o_proj|mlp(\..+)?\.down_proj)")
    for name in [*dict(model.named_modules()), *(owned.name for owned in owned_parameters(model))]:
        if re.fullmatch(rf"layers\.\d+\.{names}", name):
            yield name, outputs
