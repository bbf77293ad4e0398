"""The regions that torch.compile compiles: lowered by Inductor for an H100, and their kernels counted.

Inductor generates the Python code that launches the kernels of a graph. This module reads the launches from that code,
and does not compile the kernels. The graphs themselves run on fake tensors, so that memory is counted as usual.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes

# calls in the generated code that launch a kernel, by kind: fused by Inductor, of a library, of a registered operator
LAUNCHES = {
    "fused": re.compile(r"^\s+\w+\.run\(", re.M),
    "library": re.compile(r"^\s+(?:\w+ = )?extern_kernels\.\w+\(", re.M),
    "operator": re.compile(r"^\s+(?:\w+ = )?torch\.ops\.aten\.\w+\.\w+\(", re.M),
}


class Counting(Protocol):
    def region(self, launches: Counter[str], run: Callable[[], Any]) -> Any:
        """Count the launches of a region, and run it."""


def backend(counting: Counting) -> Any:
    """Return a backend of torch.compile whose regions report their launches to `counting`."""
    torch.version.cuda = "13.0"  # type: ignore[attr-defined]
    config.compile_threads = 1
    scheduler.has_triton = lambda *_: True

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # a backward pass may be lowered while its launches are counted
        with _disable_current_modes():
            launches = generated(graph, inputs)
        return lambda *arguments: counting.region(launches, lambda: graph(*arguments))

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=torch._functorch.partitioners.min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def generated(graph: torch.fx.GraphModule, inputs: Any) -> Counter[str]:
    """Return how many kernels of each kind Inductor's code for a graph launches."""
    fake_mode = detect_fake_mode(inputs)
    compile_fx.view_to_reshape(graph)
    with V.set_fake_mode(fake_mode):
        compile_fx.fake_tensor_prop(graph, inputs)
        post_grad_passes(graph, is_inference=False)
        compile_fx.fake_tensor_prop(graph, inputs)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=fake_mode.shape_env, is_inference=False)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    text = getattr(code, "value", code)
    return Counter({kind: len(pattern.findall(text)) for kind, pattern in LAUNCHES.items()})
