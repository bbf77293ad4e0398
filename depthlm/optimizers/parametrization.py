"""Parametrizations: how initial values, rates, decay and epsilon follow from width and depth, so that rates transfer.

m_D = D / D_base is the ratio of the hidden sizes, m_L = L / L_base that of the layers, m = fan_in / fan_in_base that of
a matrix, and e the width of a head. The factors are relative to those of the base size, where all are 1.

    muP (arXiv 2203.03466):                  matrices: std / sqrt(m), rate / m;  logits / m_D;  scores sqrt(e_base / e)
    CompleteP (arXiv 2505.01618, alpha 1):   also outputs of sublayers / m_L, decay of matrices m, epsilon / (m_D m_L)

Where a read does not add up all outputs, the number of those that it adds up takes the place of L in their factor
(`count_summed_outputs`). A mean counts as a sum, since a norm follows. A factor c of the result of a parameter w is
part of w: it starts as c w, with rate c, and with decay and epsilon 1 / c. With an optimizer whose updates do not
depend on the scale of gradients, such as AdamW, that is the same as a factor in the model, but for the clipping of
gradients, and costs nothing. So the factors equal those of the released code of CompleteP
(github.com/EleutherAI/nanoGPT-mup).

A module declares those of its own and its children's parameters whose rate follows the width unlike that of a matrix,
as m to a negative power: 1 for a vector over which a product sums, 2 for a matrix whose result another product sums.

    width_exponents = {"query": 1.0, "query_proj.weight": 2.0}

In the same way, CompleteP takes m_L to a negative power for the rate of a parameter whose effect each layer adds to the
hidden state beside the outputs: 1 for a learned factor of the residual stream, and 2 for vectors with such a factor for
each layer before it.

    depth_exponents = {"weight": 1.0}
"""

import re
from typing import Literal

from torch import nn

from depthlm.model.connection import Connection
from depthlm.model.decoder import Decoder
from depthlm.model.parameters import Factors, kind_of, owned_parameters

# the last matrix of a sublayer
LAST_MATRICES = r"layers\.\d+\.(attention\.o_proj|mlp(\..+)?\.down_proj)"


def parametrize(model: Decoder, base: Decoder, name: Literal["mup", "completep"], base_connection: Connection) -> None:
    """Give a model the factors of its parameters, by name, as `model.factors`.

    base: a model with the widths of the base size, but as many layers. base_connection: the first one of the base size.

    Raises ValueError if CompleteP is not defined for the connections (see `Connection.accumulates`).
    """
    is_completep = name == "completep"
    width, depth, output_factor = model.size.hidden_size / base.size.hidden_size, 1.0, 1.0
    if is_completep:
        depth = model.connections[0].spec.num_layers / base_connection.spec.num_layers
        output_factor = count_summed_outputs(base_connection) / count_summed_outputs(model.connections[0])
    eps = 1 / (width * depth) if is_completep else 1.0
    result_factors = _result_factors(model, base, width, output_factor)
    width_exponents = _read_exponents(model, "width_exponents")
    depth_exponents = _read_exponents(model, "depth_exponents")
    for owned, of_base in zip(owned_parameters(model), owned_parameters(base), strict=True):
        is_matrix = kind_of(owned) in ("matrix", "experts")
        exponent = width_exponents.get(owned.name, 1.0 if is_matrix else 0.0)
        m = owned.parameter.shape[-1] / of_base.parameter.shape[-1] if exponent else 1.0
        factors = Factors(m**-0.5, 1 / m, m if is_completep else 1.0, eps).scaled(m ** (1 - exponent))
        factors = factors._replace(lr=factors.lr * depth ** -depth_exponents.get(owned.name, 0.0))
        module = owned.name.rpartition(".")[0]
        # the stacked matrices of experts are parameters of one module
        c = result_factors.get(module, result_factors.get(owned.name, 1.0))
        model.factors[owned.name] = factors.scaled(c)


def count_summed_outputs(connection: Connection) -> int:
    """Return how many outputs of sublayers the last read adds up. Raises ValueError if that is not defined."""
    rule, name = connection.accumulates, type(connection).__name__
    if rule is None:
        raise ValueError(f"not defined for {name}: {connection.why_undefined}")
    if rule != "sum" and not isinstance(rule, int):
        raise ValueError(f'{name}.accumulates = {rule!r}: must be "sum", a number of outputs, or None')
    existing = 2 * connection.spec.num_layers
    return existing if rule == "sum" else min(rule, existing)


def _read_exponents(model: nn.Module, attribute: str) -> dict[str, float]:
    """Return the exponents that modules declare, by the names of the parameters."""
    return {
        f"{path}.{name}": exponent
        for path, module in model.named_modules()
        for name, exponent in getattr(module, attribute, {}).items()
    }


def _result_factors(model: Decoder, base: Decoder, width: float, output_factor: float) -> dict[str, float]:
    """Return the factors of the results of modules and parameters, by their names: logits, scores and outputs."""
    factors = {"final_norm": 1 / width}
    for (path, module), of_base in zip(model.named_modules(), base.modules(), strict=True):
        # an attention, over the sequence or over depth
        if (key_size := getattr(module, "key_size", None)) is not None:
            last = "q_norm" if hasattr(module, "q_norm") else "q_proj"
            factors[f"{path}.{last}"] = (of_base.key_size / key_size) ** 0.5
    for name in [*dict(model.named_modules()), *dict(model.named_parameters())]:
        if re.fullmatch(LAST_MATRICES, name):
            factors[name] = output_factor
    return factors
