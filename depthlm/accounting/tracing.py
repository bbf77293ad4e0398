"""Count the memory of one forward and backward pass on meta tensors, without computing it.

`trace` runs the decoder itself on the device `meta`, so it counts everything that a mechanism retains, also with
activation checkpointing and document masks. `_SimulatedDevice` simulates the device, and `_Ledger` counts.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from depthlm.model import Decoder
from depthlm.ops.cross_entropy import chunked as linear_cross_entropy

META = torch.device("meta")

# functions that autocast computes in 16 bits; on a GPU, in fp32 from a cast input; on a GPU, with a result in fp32
LOWER = {
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "mv",
    "addmm",
    "addbmm",
    "baddbmm",
    "einsum",
    "linalg_vecdot",
    "conv1d",
    "scaled_dot_product_attention",
}
FP32 = {
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "reciprocal",
    "rsqrt",
    "pow",
    "__pow__",
    "__rpow__",
    "softplus",
    "layer_norm",
    "group_norm",
    "logsumexp",
    "norm",
    "cosine_similarity",
    "mse_loss",
}
FP32_RESULT = {"sum", "prod", "softmax", "log_softmax", "cumsum", "cumprod", "linalg_vector_norm"}
HALF = (torch.float16, torch.bfloat16)
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):
    FP32.add("rms_norm")

# operators of ours with an implementation in PyTorch, which is traced, to count the memory that they use meanwhile
BODIES: dict[Any, Callable[..., Any]] = {
    linear_cross_entropy.chunked: linear_cross_entropy.forward,
    linear_cross_entropy.chunked_backward: linear_cross_entropy.backward,
}


@dataclass(frozen=True)
class Trace:
    """The memory of one forward and backward pass in bytes, without weights and gradients that existed before.

    saved: kept for the backward pass. peak: the most alive at once, including the new gradients of weights.
    """

    saved: int
    peak: int


def trace(
    model: Decoder,
    device: str,
    micro_batch_size: int,
    sequence_length: int,
    autocast: torch.dtype | None = None,
    z_loss: float = 0.0,
    accumulating: bool = False,
) -> Trace:
    """Return the memory of a micro-batch on `cpu` or `cuda`, which this machine need not have.

    model: on meta, with weights in the dtype of the run. autocast: the dtype under autocast; None: no autocast.
    accumulating: whether gradients of earlier micro-batches exist.
    """
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if accumulating else None
    tokens = torch.empty(micro_batch_size, sequence_length + 1, dtype=torch.long, device=META)
    uncounted = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    ledger, simulated_device = _Ledger(uncounted), _SimulatedDevice(device)
    try:
        with ledger, simulated_device, META:
            with simulated_device.autocast(autocast):
                sums = model(tokens[:, :-1], tokens[:, 1:], seeds_b=tokens[:, 0].int())
                loss = sums.total(z_loss)
            saved = ledger.live
            # loss.backward() calls this engine, but as a torch function it would leave `simulated_device`
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    return Trace(saved, ledger.peak)


class _Ledger(TorchDispatchMode):
    """Counts the bytes of all live storages, and their peak."""

    def __init__(self, uncounted: list[Tensor]):
        """uncounted: tensors that are not counted."""
        super().__init__()
        self.live = self.peak = 0
        self.storages: dict[int, weakref.ref | None] = {x.untyped_storage()._cdata: None for x in uncounted}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body = BODIES.get(func)
        if body is not None:
            with self:
                return body(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            result = _run(func, args, kwargs or {})
            for x in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(x, Tensor) and x.is_meta:
                    self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def release(_: Any) -> None:
            self.live -= size
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, release)
        self.live += size
        self.peak = max(self.peak, self.live)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator.

    PyTorch takes up to a millisecond to find the shape of one on meta, and the layers of a decoder repeat their calls.
    """
    shapes = _find_shapes(func, _describe(args), _describe(list(kwargs.items()))) if _is_pure(func) else None
    if shapes is None:
        return func(*args, **kwargs)
    results = tuple(_rebuild(shapes))
    return results if len(results) > 1 else results[0]


@functools.cache
def _is_pure(func: Any) -> bool:
    """Return whether an operator returns new tensors only and changes nothing."""
    returns = {str(returned.type) for returned in func._schema.returns}
    return returns == {"Tensor"} and not (func.is_view or func._schema.is_mutable)


@functools.cache
def _find_shapes(func: Any, args: Any, kwargs: Any) -> "tuple[_Shape, ...] | None":
    """Return the shapes of an operator's results; None if one is missing, not on meta or shares its storage."""
    inputs = _rebuild(args)
    if not all(x.is_meta for x in tree_leaves(inputs) if isinstance(x, Tensor)):
        return None
    result = func(*inputs, **dict(_rebuild(kwargs)))
    results = [result] if isinstance(result, Tensor) else result
    storages = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
    for x in results:
        # an operator may leave out a gradient
        if not isinstance(x, Tensor) or not x.is_meta or x.untyped_storage()._cdata in storages:
            return None
        # or return a part of what it has allocated
        if x.untyped_storage().nbytes() != _rebuild(_describe(x)).untyped_storage().nbytes():
            return None
        storages.add(x.untyped_storage()._cdata)
    return _describe(results)


class _Shape(NamedTuple):
    """What the shape of a result depends on of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Constant(NamedTuple):
    """An argument that is no tensor. Its type distinguishes 1, 1.0 and True."""

    value: Any
    kind: type


def _describe(x: Any) -> Any:
    """Return an argument or result of an operator as a key."""
    if isinstance(x, Tensor):
        return _Shape(x.shape, x.stride(), x.dtype, x.device)
    return tuple(map(_describe, x)) if isinstance(x, list | tuple) else _Constant(x, type(x))


def _rebuild(x: Any) -> Any:
    if isinstance(x, _Shape):
        return torch.ops.aten.empty_strided.default(x.shape, x.stride, dtype=x.dtype, device=x.device)
    return x.value if isinstance(x, _Constant) else [*map(_rebuild, x)]


class _SimulatedDevice(TorchFunctionMode):
    """Makes meta tensors report that they are on the CPU or a GPU, and PyTorch's functions behave as on that device.

    Autocast ignores meta tensors, so its casts are made here. Its state is that of the CPU, for every device.
    """

    def __init__(self, device: str):
        super().__init__()
        self.cuda = device == "cuda"
        self.properties = {
            torch.Tensor.is_cuda.__get__: self.cuda,  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: not self.cuda,  # type: ignore[attr-defined]
        }
        self.cast_weights: dict[int, Tensor] | None = None

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Turn autocast on; it casts each weight only once."""
        self.cast_weights = {}
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            yield
        self.cast_weights = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.properties:
            return self.properties[func]
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = self._cast(name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(self.cuda, *args, **kwargs)
        if name == "rms_norm" and self.cuda:
            return _FusedNorm.apply(*args, *kwargs.values())
        return func(*args, **kwargs)

    def _cast(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a function after autocast."""
        if name in LOWER:
            to, types = torch.get_autocast_dtype("cpu"), [torch.float32, *HALF]
        elif self.cuda and name in FP32:
            to, types = torch.float32, [*HALF]
        elif self.cuda and name in FP32_RESULT and args[0].dtype in HALF:
            return args, {"dtype": torch.float32} | kwargs
        else:
            return args, kwargs
        return tree_map(lambda x: self._to(x, to) if isinstance(x, Tensor) and x.dtype in types else x, (args, kwargs))

    def _to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        cast_weights = self.cast_weights if torch.is_autocast_cache_enabled() else None
        if cast_weights is None or not (x.is_leaf and x.requires_grad) or x.dtype == dtype:
            return x.to(dtype)
        if id(x) not in cast_weights:
            cast_weights[id(x)] = x.to(dtype)
        return cast_weights[id(x)]


class _FusedNorm(torch.autograd.Function):
    """PyTorch's fused RMS norm on a GPU, which saves x, the weight and one number per row. Others are decomposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.dim() - len(shape)], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight), None


def _attention(
    cuda: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that scaled_dot_product_attention selects on the device.

    That is flash attention if possible, else on a GPU the memory-efficient kernel, which supports no grouped queries,
    else the kernel that materializes all scores.
    """
    aten = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    if not cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if q.dtype in HALF and attn_mask is None and q.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1 and (attn_mask is not None or q.dtype is torch.float32):
        # as `attend_to` does on a GPU
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    if q.shape[-3] == k.shape[-3]:
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, q.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
