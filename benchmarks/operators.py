"""The operators over depth as the mechanisms use them: their inputs at a shape, and the values that they must move.

A floor counts what comes in read once forward and once backward, its gradient written, what goes out written, and the
gradient of that read. Parameters, maps and log-sum-exps are left out: at most 2%. What an operator reads again of what
it wrote, as most backward passes do, is above its floor.

Shapes: b batch, t tokens, s reads, n sources or streams, i new and j old streams, m maps of a token, w width of the
streams, d hidden size, h query heads, k key/value heads, e head size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import depthlm
from depthlm.kernels.attention_residuals.reference import depth_attend
from depthlm.kernels.backend import using
from depthlm.kernels.depth_attention.reference import depth_value_mix
from depthlm.kernels.gated_residuals.reference import gated_reads, weighted_reads
from depthlm.kernels.mhc.reference import mhc_post_pre
from depthlm.kernels.moda.merge import merged_attention
from depthlm.model.connections.phases import READS

TABLES = Path(__file__).parent / "tables" / "kernels"
EPS = 1e-6
# of mHC
STREAMS, ITERATIONS = 4, 20
# of a block of DeepCrossAttention: q, k and v
INPUTS = 3

Outputs = tuple[Tensor, ...]


class Shape(NamedTuple):
    """What the inputs of every operator are made of. entries: over depth, of MoDA."""

    batch: int
    length: int
    d: int
    layers: int
    h: int
    k: int
    e: int
    entries: int


class Case(NamedTuple):
    """An operator at its inputs. values: those that it must move for a token; flash: MoDA's attention without depth."""

    run: Callable[[], Outputs]
    inputs: list[Tensor]
    values: int
    flash: Callable[[], Outputs] | None = None


class Make(NamedTuple):
    """Random inputs that ask for gradients, the same for the same seed."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.generator.device).mul_(scale)
        return x.to(dtype or self.dtype).requires_grad_()

    def parameter(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, scale=scale, dtype=torch.float32)

    def streams(self, shape: Shape, n: int) -> list[Tensor]:
        """n sources x_btd."""
        return [self.normal(shape.batch, shape.length, shape.d) for _ in range(n)]

    def heads(self, shape: Shape, heads: int, n: int) -> list[Tensor]:
        """n tensors x_bhte that lie in memory as projections leave them, by tokens."""
        return [
            self.normal(shape.batch, shape.length, heads, shape.e).detach().transpose(1, 2).requires_grad_()
            for _ in range(n)
        ]


def step(run: Callable[[], Outputs], inputs: list[Tensor], kernels: str) -> Callable[[], Outputs]:
    """Forward and backward; returns outputs and gradients."""
    with torch.no_grad():
        generator = torch.Generator(inputs[0].device).manual_seed(1)
        grads = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in run()]

    def turn() -> Outputs:
        with using(kernels):
            outputs = run()
        return *outputs, *torch.autograd.grad(outputs, inputs, grads)

    return turn


def difference(found: Outputs, expected: Outputs) -> float:
    """The largest, as a share of the largest number of its tensor."""
    pairs = [(x.float(), y.float()) for x, y in zip(found, expected, strict=True)]
    shares = [(x - y).abs().max() / y.abs().max().clamp_min(1e-30) for x, y in pairs]
    # of torch: Python's max passes over a NaN
    return torch.stack(shares).max().item()


def shape_of(size: str, batch: int, length: int) -> Shape:
    """The shape of a size of conf/size. MoDA's entries are those of the middle layer: of attentions and MLPs."""
    found = depthlm.compose([f"size={size}"], here=False).size
    heads = found.num_heads, found.num_kv_heads, found.head_size
    return Shape(batch, length, found.hidden_size, found.num_layers, *heads, entries=found.num_layers // 2 * 2)


def read_table(name: str) -> list[tuple[dict[str, Any], Shape]]:
    """A paper's settings of MoDA: each row, and its shape."""
    table: Any = OmegaConf.to_container(OmegaConf.load(TABLES / f"{name}.yaml"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return [(row, _shape_of_row(row, table["batch_size"], table["head_size"])) for row in rows]


def _shape_of_row(row: dict[str, Any], batch: int, e: int) -> Shape:
    heads = row["num_heads"], row["num_kv_heads"]
    return Shape(batch, row["length"], row["num_heads"] * e, 0, *heads, e=e, entries=row["entries"])


def value_mix_values(n: int, h: int, k: int, e: int) -> int:
    """Of a token: queries and n keys and values three times, the mix and its gradient."""
    return 3 * (h + 2 * n * k) * e + 2 * k * e


def reads_values(s: int, n: int, d: int) -> int:
    """Of a token: n sources three times, s reads and their gradients."""
    return 3 * n * d + 2 * s * d


def streams_values(n: int, d: int) -> int:
    """Of a token: n streams and an output three times, new streams and an input and their gradients."""
    return 5 * (n + 1) * d


def depth_part_values(n: int, h: int, k: int, e: int) -> int:
    """Of a token, above those of flash attention: queries and n keys and values three times, flash's context once, the
    merged one written, read again, and its gradient."""
    return 3 * (h + 2 * n * k) * e + 4 * h * e


def value_mix(shape: Shape, make: Make) -> Case:
    """The mix of the last layer: of the sources at stride L / 2, and itself."""
    h, k = shape.h, shape.k
    n = len(range(0, shape.layers - 1, max(1, shape.layers // 2))) + 1
    (q,), entries = make.heads(shape, h, 1), make.heads(shape, k, 2 * n)
    values = value_mix_values(n, h, k, shape.e)
    return Case(lambda: (depth_value_mix(q, entries[:n], entries[n:]),), [q, *entries], values)


def residual_reads(shape: Shape, make: Make, block: int) -> Case:
    """The phase of attention_residuals that begins at the middle layer, over what is there at its beginning."""
    n = 1 + shape.layers // READS * READS // block
    query, sources = make.parameter(READS, shape.d, scale=shape.d**-0.5), make.streams(shape, n)
    return Case(lambda: depth_attend(query, sources, EPS), [query, *sources], reads_values(READS, n, shape.d))


def attend_block(shape: Shape, make: Make) -> Case:
    return residual_reads(shape, make, -(-2 * shape.layers // 8))


def attend_full(shape: Shape, make: Make) -> Case:
    return residual_reads(shape, make, 1)


def dense_reads(shape: Shape, make: Make) -> Case:
    """The phase of denseformer that begins with the average after the middle layer."""
    n = shape.layers // 2 // READS * READS + 2
    weights, sources = make.parameter(READS, n), make.streams(shape, n)
    return Case(lambda: (weighted_reads(weights, sources),), [weights, *sources], reads_values(READS, n, shape.d))


def cross_reads(shape: Shape, make: Make) -> Case:
    """The phase of dca that begins at the middle layer: of as many blocks as fit into READS."""
    blocks = READS // INPUTS
    s, n = blocks * INPUTS, shape.layers // 2 // blocks * blocks + 1
    bias, gate = make.parameter(s, n, shape.d), make.parameter(s, n, shape.d, scale=shape.d**-0.5)
    sources = make.streams(shape, n)
    values = reads_values(s, n, shape.d)
    return Case(lambda: (gated_reads(bias, gate, sources),), [bias, gate, *sources], values)


def streams_post_pre(shape: Shape, make: Make) -> Case:
    """One write and the next read of mHC."""
    b, t, n, d = shape.batch, shape.length, STREAMS, shape.d
    m = n * (n + 2)
    x_btnd, output_btd = make.normal(b, t, n, d), make.normal(b, t, d)
    post_btn, res_btij = make.parameter(b, t, n), make.parameter(b, t, n, n, scale=n**-0.5)
    phi_mw, alpha, bias_m = make.parameter(m, n * d, scale=(n * d) ** -0.5), make.parameter(3), make.parameter(m)
    pending = output_btd, post_btn, res_btij
    inputs = [x_btnd, *pending, phi_mw, alpha, bias_m]
    run = lambda: mhc_post_pre(x_btnd, pending, phi_mw, alpha, bias_m, EPS, ITERATIONS)  # noqa: E731
    return Case(run, inputs, streams_values(n, d))


def moda(shape: Shape, make: Make) -> Case:
    """MoDA's attention, and flash attention alone."""
    h, k, n = shape.h, shape.k, shape.entries
    (q,), (key, value) = make.heads(shape, h, 1), make.heads(shape, k, 2)
    entries = make.heads(shape, k, 2 * n)
    depth = list(zip(entries[:n], entries[n:], strict=True))
    values = depth_part_values(n, h, k, shape.e)
    return Case(
        lambda: (merged_attention(q, key, value, depth),),
        [q, key, value, *entries],
        values,
        lambda: (causal_flash(q, key, value),),
    )


def causal_flash(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, is_causal=True, enable_gqa=True)


CASES: dict[str, Callable[[Shape, Make], Case]] = {
    "depth_value_mix": value_mix,
    "depth_attend_block": attend_block,
    "depth_attend_full": attend_full,
    "weighted_reads": dense_reads,
    "gated_reads": cross_reads,
    "mhc_post_pre": streams_post_pre,
    "merged_attention": moda,
}
