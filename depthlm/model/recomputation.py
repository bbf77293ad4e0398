"""Activation checkpointing (arXiv 1604.06174): layers whose activations the backward pass computes again."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from depthlm.ops.backend import using

SELECTIVE = "selective"


def recomputed(layer: Callable, position: int, how: bool | int | str, kernels: str) -> Callable:
    """Return a layer whose activations are recomputed in the backward pass, or the layer itself.

    how: True: every layer; n: layers 0, n, 2n, ... by their position; "selective": every layer, but its matrix products
    and attention over the sequence are stored; False: no layer.
    """
    if not how or not torch.is_grad_enabled():
        return layer
    if how != SELECTIVE and position % int(how):
        return layer
    contexts = _selective if how == SELECTIVE else _contexts
    return partial(checkpoint, layer, use_reentrant=False, context_fn=partial(contexts, kernels))


def _contexts(kernels: str) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a layer's forward pass and of its recomputation, which runs outside `Decoder.hidden`."""
    return nullcontext(), using(kernels)


def _selective(kernels: str) -> tuple[AbstractContextManager, AbstractContextManager]:
    forward, again = create_selective_checkpoint_contexts(stored_operators())
    return forward, _both(using(kernels), again)


@contextmanager
def _both(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    with outer, inner:
        yield


def stored_operators() -> list[Any]:
    """Return the operators whose results are stored: matrix products, and attention over a sequence."""
    aten = torch.ops.aten
    names = (
        "mm",
        "addmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]
