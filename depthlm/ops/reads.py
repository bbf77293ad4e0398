"""The autograd side of reads over depth in Triton: it splits reads into launches and sums the gradients of sources.

Many reads load the same source. Autograd would make a gradient of the source for each of them, and add them up one by
one, which moves twice as many bytes. So the kernels add their gradients to one sum:

    x -> Source -> token -> read 0
                     `----> read 1

A token is an empty tensor. Because of it, autograd runs the backward pass of a Source, which returns the sum as the
gradient of x, after those of all reads of x. The reads themselves return no gradient for x.

Shapes: s reads, p positions (any leading dimensions), d width.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthlm.ops.autograd import NO_PASS, attach, call, current_pass, last_input_nodes, present
from depthlm.ops.backend import expect
from depthlm.ops.dtypes import common_dtype

# the most reads of a launch
MAX_READS = 8
# schemas of the operators that launch the kernels of a pass; the caller allocates what they write
FORWARD = "(Tensor[] parameters, Tensor[] sources, Tensor[] start, float? eps, Tensor(a!)[] outputs) -> ()"
BACKWARD = (
    "(Tensor[] grads, Tensor[] outputs, Tensor[] parameters, Tensor[] sources, Tensor[] start, float? eps, "
    "Tensor(a!)[] source_grads, bool[] added, Tensor(b!)[] sums) -> ()"
)


class BackwardInputs(NamedTuple):
    """What a backward pass reads, and where it writes the gradients of the sources.

    grads: of the results; the gradient of lse_sp is missing if nobody uses it. outputs: of the forward pass, without
    out_spd unless the kernels save it. start: out_spd is empty unless the kernels need it.
    added: whether the gradient of a source is added to what `source_grads` has.
    """

    grads: list[Tensor]
    outputs: list[Tensor]
    parameters: list[Tensor]
    sources: list[Tensor]
    start: list[Tensor]
    eps: float | None
    source_grads: list[Tensor]
    added: list[bool]


class Kernels(NamedTuple):
    """The kernels of an operator, which reads up to MAX_READS outputs at once.

    allocate: return what the forward pass writes besides out_spd: lse_sp if that is a result, and what is saved.
    forward: an operator as FORWARD says. backward: return the gradients of the parameters and of the start.
    saves_out_of_one: a launch of one read saves its output, which a sublayer keeps in any case.
    """

    operator: str
    num_results: int
    allocate: Callable[[list[Tensor], list[Tensor]], list[Tensor]]
    forward: Callable[..., None]
    backward: Callable[[BackwardInputs], list[Tensor]]
    saves_out_of_one: bool = False
    saves_start: bool = False


def read(
    kernels: Kernels,
    parameters: Sequence[Tensor],
    sources: Sequence[Tensor],
    start: Sequence[Tensor],
    eps: float | None = None,
    shared: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return the results of all reads.

    parameters: one row per read. start: out_spd, then lse_sp if that is a result; or empty. shared: parameters of all
    reads.
    Raises: ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    reads, shape = len(parameters[0]), sources[0].shape
    expect(kernels.operator, parameters[0], **{f"source {j}": (x, shape) for j, x in enumerate(sources)})
    if start:
        expect(kernels.operator, parameters[0], start=(start[0], (reads, *shape)))
    dtype = common_dtype([*sources, *start[:1]])
    # a kernel has one 16-bit dtype
    mixed = {torch.float16, torch.bfloat16} <= {x.dtype for x in sources}
    xs = [x.float() if mixed else x for x in sources]
    tokens, groups = tokens_of(xs), []
    for first in range(0, reads, MAX_READS):
        # with a single group, x itself, so that autograd copies no gradient
        of_reads = [x if reads <= MAX_READS else x[first : first + MAX_READS] for x in (*parameters, *start)]
        lists = [*of_reads[: len(parameters)], *shared], xs, of_reads[len(parameters) :], tokens
        groups.append(call(Reads, kernels, eps, dtype, [len(x) for x in lists], *(x for part in lists for x in part)))
    return [part[0] if len(groups) == 1 else torch.cat(part) for part in zip(*groups, strict=True)]


class Reads(torch.autograd.Function):
    """A group of reads. counts: the numbers of parameters, sources, tensors of the start, and tokens."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, eps: float | None, dtype: torch.dtype, counts: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        parameters, sources, start, _ = _split(tensors, counts)
        out = parameters[0].new_empty(len(parameters[0]), *sources[0].shape, dtype=dtype)
        outputs = [out, *kernels.allocate(parameters, sources)]
        kernels.forward(parameters, sources, start, eps, outputs)
        saved = outputs if kernels.saves_out_of_one and len(parameters[0]) == 1 else outputs[1:]
        if start and not kernels.saves_start:
            start[0] = start[0].new_empty(0)
        ctx.kernels, ctx.eps, ctx.dtype, ctx.counts = kernels, eps, dtype, [len(saved), *counts]
        # an lse is used only if a later read continues from it, so its gradient is usually None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *parameters, *sources, *start)
        return tuple(outputs[: kernels.num_results])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        outputs, parameters, sources, start = _split(ctx.saved_tensors, ctx.counts[:-1])
        num_tokens = ctx.counts[-1]
        source_grads, added = reserve_sums(ctx, num_tokens, sources)
        grad = grads[0]
        if grad is None:
            grad = source_grads[0].new_zeros(len(parameters[0]), *sources[0].shape, dtype=ctx.dtype)
        inputs = [grad, *present(*grads[1:])], outputs, parameters, sources, start, ctx.eps, source_grads, added
        results = iter(ctx.kernels.backward(BackwardInputs(*inputs)))
        of_parameters = list(islice(results, len(parameters)))
        of_sources = [None] * len(sources) if num_tokens else source_grads
        return None, None, None, None, *of_parameters, *of_sources, *results, *[None] * num_tokens


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    remaining = iter(tensors)
    return [list(islice(remaining, count)) for count in counts]


class Source(torch.autograd.Function):
    """Returns a token of x. Its backward pass returns the sum of the gradients of x over all reads.

    task: identifies the backward pass in which `total` was summed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.task, ctx.total = NO_PASS, None
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_token: Tensor | None) -> Tensor | None:
        total, ctx.total = ctx.total, None
        return total if ctx.task == current_pass() else None


def tokens_of(sources: Sequence[Tensor]) -> list[Tensor]:
    """Return a token of each source, or an empty list if autograd itself must sum the gradients of the sources."""
    # a kernel that writes several sources at once would add to the one sum of a source that occurs twice, in no order
    repeated = len({id(x) for x in sources}) < len(sources)
    if repeated or not torch.is_grad_enabled() or any(x.grad_fn is None for x in sources):
        return []
    # all reads of x must find the same token
    return [attach(x, "source_token", Source.apply) for x in sources]


def reserve_sums(ctx: Any, num_tokens: int, sources: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
    """Return where a kernel must write the gradients of the sources, and to which of them it must add.

    ctx: of a read whose last inputs are the tokens.
    """
    if not num_tokens:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sources], [False] * len(sources)
    task, sums, added = current_pass(), [], []
    for node, x in zip(last_input_nodes(ctx, num_tokens), sources, strict=True):
        added.append(node.task == task and node.total is not None)
        if not added[-1]:
            node.task, node.total = task, torch.empty_like(x, memory_format=torch.contiguous_format)
        sums.append(node.total)
    return sums, added
