"""Reads over depth of random inputs: of attention_residuals (attend), denseformer (weighted) and dca (gated)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthlm.ops.attention_residuals.naive import depth_attend
from depthlm.ops.backend import using
from depthlm.ops.dca.naive import gated_reads
from depthlm.ops.denseformer.naive import weighted_reads

from .inputs import single as normal

READS = ("attend", "weighted", "gated")
# of an operator by its name: parameters, sources and start
Arguments = dict[str, Any]


def parameters_of(kind: str, reads: int, n: int, d: int, biased: bool = False) -> list[Tensor | None]:
    if kind == "attend":
        return [normal(reads, d), normal(n, seed=92) if biased else None]
    shape = (reads, n) if kind == "weighted" else (reads, n, d)
    return [normal(*shape), *([normal(*shape, seed=94)] if kind == "gated" else [])]


def tensors(kind: str, reads: int, n: int, t: int, d: int, started: bool, biased: bool | None = None) -> Arguments:
    """biased: whether attention has a bias; None: if it is started."""
    start = [normal(reads, 2, t, d, seed=91), *([normal(reads, 2, t, seed=93)] if kind == "attend" else [])]
    return {
        "parameters": parameters_of(kind, reads, n, d, started if biased is None else biased),
        "sources": [normal(2, t, d, seed=j) for j in range(1, n + 1)],
        "start": start if started else (),
    }


def read(
    kind: str, parameters: Sequence[Any], sources: Sequence[Tensor], start: Sequence[Tensor], eps: float | None = 1e-5
) -> Sequence[Tensor]:
    if kind == "attend":
        query, bias = parameters
        return depth_attend(query, sources, eps, bias, (start[0], start[1]) if start else None)
    operator: Callable[..., Tensor] = weighted_reads if kind == "weighted" else gated_reads
    return [operator(*parameters, sources, start[0] if start else None)]


def results(
    kind: str, kernels: str, arguments: Arguments, dtype: torch.dtype | None = None, eps: float | None = 1e-5
) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs."""
    made = {
        name: [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in part]
        for name, part in arguments.items()
    }
    with using(kernels):
        outputs = read(kind, **made, eps=eps)
    inputs = [x for part in made.values() for x in part if x is not None]
    grads = [normal(*x.shape, seed=95 + i).to(x.dtype) for i, x in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]
