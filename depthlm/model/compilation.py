"""torch.compile for the parts of a decoder that do not depend on the mechanism."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from depthlm.model.decoder import Decoder, head_and_loss
from depthlm.model.layer import Layer

# methods of a layer: those without the depth mechanism, and those that contain them and a connection
SUBLAYERS = ("project", "output", "transform")
REGIONS = ("before_attention", "after_attention")


def compile_sublayers(model: Decoder, backend: str = "inductor") -> None:
    """Compile in place the matrix products and norms of each sublayer, and the final norm, the head and the loss.

    All layers share one compilation. The depth mechanism itself is not compiled. Names in state_dict do not change.
    """
    # imported here, since it takes seconds
    from torch._dynamo import lookup_backend

    compiler = _allow_recomputation(lookup_backend(backend))
    for name in REGIONS if all(c.is_compiled for c in model.connections) else SUBLAYERS:
        # a function that takes the layer, so that all layers share its compilation
        compiled = torch.compile(getattr(Layer, name), backend=compiler)
        for layer in model.layers:
            setattr(layer, name, MethodType(compiled, layer))
    for mixture in model.mixtures():
        mixture.experts.uncompiled = torch.compiler.disable(mixture.experts.uncompiled)
    model.head_and_loss = torch.compile(head_and_loss, backend=compiler)
    model.is_compiled = True


def _allow_recomputation(compiler: Callable) -> Callable:
    """Let the backward pass recompute cheap factors of a matrix product on a GPU, such as the activation of an MLP.

    By default torch.compile stores them, and a step needs more memory than without it. On a CPU memory is not scarce.
    """

    from torch._functorch import config as functorch_config

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        on_cpu = all(x.is_cpu for x in inputs if isinstance(x, Tensor))
        with functorch_config.patch(ban_recompute_materialized_backward=on_cpu):
            return compiler(graph, inputs)

    return compile_graph
