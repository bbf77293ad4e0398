"""Every launch of Triton kernels compiles to machine code for GPUs that this machine need not have."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# in a separate process, since triton cannot compile after it was imported for its interpreter. On CPU tensors, launches
# are compiled for the given architecture, and nothing is computed
LAUNCHES = """
import sys
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

answers = {"current_target": GPUTarget("cuda", int(sys.argv[1]), 32), "current_device": 0, "current_stream": 0}
answers["active_torch_device"] = torch.device("cpu")
driver.set_active(SimpleNamespace(**{f"get_{name}": lambda *_, x=x: x for name, x in answers.items()}))
launch = JITFunction.run
JITFunction.run = lambda *args, **kwargs: launch(*args, **kwargs | {"warmup": True})

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

def zeros(*shape, dtype=FP32):
    return torch.zeros(shape, dtype=dtype)
"""
# one read and several, of sources of two dtypes, forward and backward
READS = """
from depthlm.ops.attention_residuals.triton import depth_attend
from depthlm.ops.denseformer.triton import weighted
from depthlm.ops.dca.triton import gated

sources = [zeros(40, 2048, dtype=dtype).requires_grad_() for dtype in (FP32, BF16)]
for reads in (1, 2):
    query, weights, bias, start, lse = (
        zeros(reads, *shape).requires_grad_() for shape in ((2048,), (2,), (2, 2048), (40, 2048), (40,))
    )
    attended = depth_attend(query, sources, 1e-5, weights[0], (start, lse))
    outputs = [*attended, weighted(weights, sources, start), gated(bias, bias, sources, start)]
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])
"""
STREAMS = """
from depthlm.ops.hyper_connections import triton as hyper
from depthlm.ops.mhc import triton as mhc
from depthlm.ops.mhc.cpu import PAPER
from depthlm.ops.mhc.triton_streams import write_streams

def compile_both(operators, sources, parameters, settings, maps):
    pending = len(sources) > 1
    read, new, *outputs = operators.forward(sources, parameters, *settings)
    grads, kept = [read, new, *outputs[:maps]], outputs[maps:]
    operators.backward(grads, sources, new if pending else sources[0], parameters, kept, *settings)
    if pending:
        write_streams(sources)

d = 128
for streams, output, dtype, n, pending, identity, late in (
    (FP32, FP32, FP32, 4, True, False, False),
    (FP32, BF16, BF16, 2, True, False, False),
    (FP32, BF16, BF16, 4, False, False, False),
    (BF16, BF16, BF16, 4, True, False, False),
    (BF16, BF16, BF16, 4, True, True, False),
    (BF16, BF16, BF16, 4, True, False, True),
):
    sources = [zeros(1, 2, n, d, dtype=streams)]
    if pending:
        sources += [zeros(1, 2, d, dtype=output), zeros(1, 2, n), *([] if identity else [zeros(1, 2, n, n)])]
    m, maps = (2 * n, 1) if identity else (n * (n + 2), 2)
    parameters = [*([zeros(1, 2, n)] if late else []), zeros(m, n * d), zeros(n * d), zeros(m), zeros(maps + 1)]
    compile_both(mhc, sources, parameters, (1e-5, 3, [*PAPER], dtype, late), maps + late)
    if not identity and not late:
        parameters = [zeros(n + 2, d), zeros(n), zeros(n), zeros(n, n), zeros(2)]
        compile_both(hyper, sources, parameters, (1e-5,), maps)
"""
HEADS = """
from depthlm.ops.depth_attention import triton as depth_attention
from depthlm.ops.moda import triton as moda

for e, groups in ((80, 5), (256, 8)):
    q, entries = zeros(1, groups, 2, e, dtype=BF16), [zeros(1, 1, 2, e, dtype=BF16) for _ in range(8)]
    mix, lse = depth_attention.forward(q, entries[:4], entries[4:])
    depth_attention.backward(mix, q, mix, lse, entries[:4], entries[4:])
for e, groups in ((64, 4), (128, 3), (256, 16)):
    q, entries = zeros(1, 4 * groups, 2, e, dtype=BF16), zeros(3, 2, 1, 2, 4, e, dtype=BF16)
    attended, lse = moda.forward(q, q, zeros(1, 4 * groups, 2), entries)
    moda.backward(q, q, attended, lse, q, entries, torch.zeros_like(entries), 1)
"""
LOSSES = """
from depthlm.ops.cross_entropy import triton as cross_entropy

for dtype in (FP32, BF16, FP16):
    logits, targets = zeros(3, 5000, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    cross_entropy.losses(logits, targets, zeros(3), zeros(3))
    cross_entropy.differentiate(logits, [targets, *(zeros(3) for _ in range(3))], torch.zeros_like(logits))
"""


@pytest.mark.parametrize(
    "architecture", [pytest.param(90, marks=pytest.mark.slow), pytest.param(80, marks=pytest.mark.release)]
)
def test_the_kernels_compile_for_gpus(architecture):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    program = "\n".join((LAUNCHES, READS, STREAMS, HEADS, LOSSES))
    command = [sys.executable, "-W", "ignore", "-c", program, str(architecture)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
