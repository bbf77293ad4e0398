"""The depth operators with the inputs that the mechanisms give them, and the number of values that they must move.

A floor counts each input as read once forward and once backward, its gradient as written, each output as written, and
its gradient as read. Parameters, maps and log-sum-exps are at most 2% and are not counted. Neither are outputs that an
operator reads again, as most backward passes do.

Shapes: b batch, t tokens, s reads, n sources or streams, i new and j old streams, m maps of a token, w width of the
streams, d hidden size, h query heads, k key/value heads, e head size.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthlm.config import compose
from depthlm.model.read_ahead import READS
from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.autograd import present
from depthlm.ops.backend import using
from depthlm.ops.dca.naive import gated_reads
from depthlm.ops.denseformer.naive import weighted_reads
from depthlm.ops.depth_attention.naive import depth_value_mix
from depthlm.ops.flash import by_cudnn
from depthlm.ops.hyper_connections.naive import hyper_post_pre
from depthlm.ops.mhc.cpu import Parameters, Pending
from depthlm.ops.mhc.naive import mhc_post_pre
from depthlm.ops.moda.bank import depth_of
from depthlm.ops.moda.merge import merged_attention

EPS = 1e-6
# number of streams of hyper-connections and mHC, and Sinkhorn iterations of mHC
STREAMS, ITERATIONS = 4, 20
# reads of a layer of DeepCrossAttention: q, k and v
INPUTS = 3

Outputs = tuple[Tensor, ...]


class Shape(NamedTuple):
    """The sizes that determine the inputs of every operator. entries: MoDA's entries over depth."""

    batch: int
    length: int
    d: int
    layers: int
    h: int
    k: int
    e: int
    entries: int


class Case(NamedTuple):
    """An operator and its inputs. values: how many it must move per token. flash: MoDA's attention without depth."""

    run: Callable[[], Outputs]
    inputs: list[Tensor]
    values: int
    flash: Callable[[], Outputs] | None = None


class Make(NamedTuple):
    """Random inputs that require gradients, the same for the same seed."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.generator.device).mul_(scale)
        return x.to(dtype or self.dtype).requires_grad_()

    def parameter(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, scale=scale, dtype=torch.float32)

    def streams(self, shape: Shape, n: int) -> list[Tensor]:
        """Return n sources x_btd."""
        return [self.normal(shape.batch, shape.length, shape.d) for _ in range(n)]

    def heads(self, shape: Shape, heads: int, n: int) -> list[Tensor]:
        """Return n tensors x_bhte with the memory layout of projections, in which tokens come before heads."""
        return [
            self.normal(shape.batch, shape.length, heads, shape.e).detach().transpose(1, 2).requires_grad_()
            for _ in range(n)
        ]


def step(
    run: Callable[[], Outputs], inputs: list[Tensor], kernels: str, rounded: Sequence[torch.dtype] | None = None
) -> Callable[[], Outputs]:
    """Return a step that runs forward and backward, and returns outputs and gradients.

    kernels: a value of `kernels`, or "compiled", the definition under torch.compile.
    rounded: the dtypes to which the gradients of the outputs are rounded (default: those of the outputs).
    """
    with torch.no_grad():
        generator = torch.Generator(inputs[0].device).manual_seed(1)
        outputs = run()
        noise = [torch.randn(y.shape, generator=generator, device=y.device) for y in outputs]
        dtypes = [y.dtype for y in outputs]
        grads = [x.to(r).to(dtype) for x, r, dtype in zip(noise, rounded or dtypes, dtypes, strict=True)]

    if kernels == "compiled":
        run, kernels = torch.compile(run), "naive"

    def turn() -> Outputs:
        with using(kernels):
            outputs = run()
        return *outputs, *torch.autograd.grad(outputs, inputs, grads)

    return turn


def difference(actual: Outputs, expected: Outputs) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    # one tensor at a time, since fp32 copies of all of them may not fit in memory
    shares = [
        (x.to(y.dtype) - y).abs().max() / y.abs().max().clamp_min(1e-30)
        for x, y in ((x, y if y.dtype == torch.float64 else y.float()) for x, y in zip(actual, expected, strict=True))
    ]
    # torch's max propagates a NaN, Python's max ignores it
    return torch.stack(shares).max().item()


def shape_of(size: str, batch: int, length: int) -> Shape:
    """Return the shape of a size of conf/size, with MoDA's entries (attentions and MLPs) at the middle layer."""
    config = compose([f"size={size}"], here=False).size
    heads = config.num_heads, config.num_kv_heads, config.head_size
    return Shape(batch, length, config.hidden_size, config.num_layers, *heads, entries=config.num_layers // 2 * 2)


def reads_values(s: int, n: int, d: int) -> int:
    """Return the values per token: n sources three times, s reads and their gradients."""
    return 3 * n * d + 2 * s * d


def streams_values(n: int, d: int) -> int:
    """Return the values per token: n streams and an output three times, new streams and an input, and gradients."""
    return 5 * (n + 1) * d


def value_mix(shape: Shape, make: Make) -> Case:
    """The mix of the last layer over the sources at stride L / 2 and the layer itself."""
    h, k = shape.h, shape.k
    n = len(range(0, shape.layers - 1, max(1, shape.layers // 2))) + 1
    (q,), entries = make.heads(shape, h, 1), make.heads(shape, k, 2 * n)
    # queries and n keys and values three times, the mix and its gradient
    values = (3 * (h + 2 * n * k) + 2 * k) * shape.e
    return Case(lambda: (depth_value_mix(q, entries[:n], entries[n:]),), [q, *entries], values)


def residual_reads(shape: Shape, make: Make, block: int) -> Case:
    """The phase of attention_residuals that begins at the middle layer, over the sources that exist then."""
    n = 1 + shape.layers // READS * READS // block
    query, sources = make.parameter(READS, shape.d, scale=shape.d**-0.5), make.streams(shape, n)
    return Case(lambda: depth_attend(query, sources, EPS), [query, *sources], reads_values(READS, n, shape.d))


def later_read(shape: Shape, make: Make) -> Case:
    """A read of attention_residuals that extends what its phase began by the running sum of its block."""
    query, sources = make.parameter(1, shape.d, scale=shape.d**-0.5), make.streams(shape, 1)
    start = make.normal(1, shape.batch, shape.length, shape.d), make.parameter(1, shape.batch, shape.length)
    # besides those of one read: the start, and its gradient
    values = reads_values(1, 1, shape.d) + 2 * shape.d
    return Case(lambda: depth_attend(query, sources, EPS, start=start)[:1], [query, *sources, *start], values)


def dense_reads(shape: Shape, make: Make) -> Case:
    """The phase of denseformer that begins with the average after the middle layer."""
    n = shape.layers // 2 // READS * READS + 2
    weights, sources = make.parameter(READS, n), make.streams(shape, n)
    return Case(lambda: (weighted_reads(weights, sources),), [weights, *sources], reads_values(READS, n, shape.d))


def cross_reads(shape: Shape, make: Make) -> Case:
    """The phase of dca that begins at the middle layer, with as many layers as fit into READS."""
    blocks = READS // INPUTS
    s, n = blocks * INPUTS, shape.layers // 2 // blocks * blocks + 1
    bias, gate = make.parameter(s, n, shape.d), make.parameter(s, n, shape.d, scale=shape.d**-0.5)
    sources = make.streams(shape, n)
    values = reads_values(s, n, shape.d)
    return Case(lambda: (gated_reads(bias, gate, sources),), [bias, gate, *sources], values)


def later_cross_reads(shape: Shape, make: Make) -> Case:
    """The reads of the second layer of a phase of dca, which add the two outputs of the first to what it began."""
    n = 2
    bias, gate = make.parameter(INPUTS, n, shape.d), make.parameter(INPUTS, n, shape.d, scale=shape.d**-0.5)
    sources, start = make.streams(shape, n), make.normal(INPUTS, shape.batch, shape.length, shape.d)
    # the gradient of the start is that of the output
    values = reads_values(INPUTS, n, shape.d) + INPUTS * shape.d
    return Case(lambda: (gated_reads(bias, gate, sources, start),), [bias, gate, *sources, start], values)


def pending_write(shape: Shape, make: Make) -> tuple[Tensor, Pending]:
    """Return X_btnd, and the output, H_post and H_res of a write."""
    b, t, n, d = shape.batch, shape.length, STREAMS, shape.d
    x_btnd, output_btd = make.normal(b, t, n, d), make.normal(b, t, d)
    return x_btnd, Pending(output_btd, make.parameter(b, t, n), make.parameter(b, t, n, n, scale=n**-0.5))


def manifold_post_pre(shape: Shape, make: Make, identity: bool = False, late: bool = False) -> Case:
    """One write and the next read of mHC.

    identity: whether H_res is the identity. late: whether H_pre is that of the sublayer before.
    """
    n, d = STREAMS, shape.d
    m = n * (2 if identity else n + 2)
    x_btnd, pending = pending_write(shape, make)
    if identity:
        pending = pending._replace(res_btij=None)
    phi_mw, norm_w = make.parameter(m, n * d, scale=(n * d) ** -0.5), make.parameter(n * d)
    parameters = Parameters(phi_mw, norm_w, make.parameter(2 if identity else 3), make.parameter(m))
    pre_btn = make.parameter(shape.batch, shape.length, n) if late else None
    inputs = [x_btnd, *present(*pending), *parameters, *present(pre_btn)]

    def call() -> tuple[Tensor, ...]:
        return tuple(present(*mhc_post_pre(x_btnd, pending, parameters, EPS, ITERATIONS, pre_btn=pre_btn)))

    return Case(call, inputs, streams_values(n, d))


def dynamic_post_pre(shape: Shape, make: Make) -> Case:
    """One write and the next read of hyper-connections."""
    n, d = STREAMS, shape.d
    x_btnd, pending = pending_write(shape, make)
    static = make.parameter(n), make.parameter(n), make.parameter(n, n, scale=n**-0.5)
    dynamic = make.parameter(n + 2, d, scale=d**-0.5), make.parameter(2)
    inputs = [x_btnd, *pending, *static, *dynamic]
    return Case(lambda: hyper_post_pre(x_btnd, pending, static, dynamic, EPS), inputs, streams_values(n, d))


def moda(shape: Shape, make: Make) -> Case:
    """MoDA's attention, and flash attention without depth."""
    h, k, n = shape.h, shape.k, shape.entries
    (q,), (key, value) = make.heads(shape, h, 1), make.heads(shape, k, 2)
    entries = make.heads(shape, k, 2 * n)
    # the entries are copied to the bank only once, which a decoder does when it makes them
    depth = depth_of(list(zip(entries[:n], entries[n:], strict=True)))
    # in addition to flash attention: queries and n keys and values three times, its context once, and the merged
    # context three times: written, read again, and its gradient
    values = (3 * (h + 2 * n * k) + 4 * h) * shape.e
    return Case(
        lambda: (merged_attention(q, key, value, depth),),
        [q, key, value, *entries],
        values,
        lambda: (causal_flash(q, key, value),),
    )


def causal_flash(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor) -> Tensor:
    # on Hopper, cuDNN's flash attention, as in `merged_attention`
    cudnn = by_cudnn(q_bhte, k_bkte, v_bkte, causal=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if cudnn else SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, is_causal=True, enable_gqa=True)


CASES: dict[str, Callable[[Shape, Make], Case]] = {
    "depth_value_mix": value_mix,
    # blocks of an eighth of the sublayers, blocks of one output, and those at half of the depth
    "depth_attend_block": lambda shape, make: residual_reads(shape, make, -(-2 * shape.layers // 8)),
    "depth_attend_full": lambda shape, make: residual_reads(shape, make, 1),
    "depth_attend_half": lambda shape, make: residual_reads(shape._replace(layers=shape.layers // 2), make, 1),
    "depth_attend_later": later_read,
    "weighted_reads": dense_reads,
    "gated_reads": cross_reads,
    "gated_reads_later": later_cross_reads,
    "mhc_post_pre": manifold_post_pre,
    "mhc_post_pre_identity": lambda shape, make: manifold_post_pre(shape, make, identity=True),
    "mhc_post_pre_late": lambda shape, make: manifold_post_pre(shape, make, late=True),
    "hyper_post_pre": dynamic_post_pre,
    "merged_attention": moda,
}
