"""An RMSNorm and a linear function that are faster on a CPU than those of PyTorch, and the last product of a SwiGLU.

In eager mode on a CPU, the norm has a hand-written backward pass with fewer passes over memory than PyTorch's. On a GPU
and without gradients PyTorch's norm is used, and torch.compile fuses the formula.

Shapes: d width of a norm or of an output, f width of an MLP.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthlm.ops.dtypes import compute_dtype, no_autocast, upcast

# largest weight for which the elementwise product with one row stays in a CPU's cache
FEW = 2**21


def rms_norm(x: Tensor, weight_d: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in fp32 or better, as the dtype of x (arXiv 1910.07467).

    weight_d: None: without a weight.
    """
    if weight_d is None:
        with no_autocast(x):
            return F.rms_norm(x, x.shape[-1:], None, eps)
    if torch.compiler.is_compiling():
        # Inductor does not fuse PyTorch's norm with its neighbours, and its kernel is slow for rows as short as a head
        x32 = upcast(x)
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight_d).to(x.dtype)
    if x.is_cpu and torch.is_grad_enabled():
        return RMSNorm.apply(x, weight_d, eps)
    # autocast would save a copy in fp32, although PyTorch's norm computes in fp32 in any case
    with no_autocast(x):
        return F.rms_norm(x, weight_d.shape, weight_d.to(x.dtype), eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b. One row on a CPU, as in decoding, is memory-bound, and BLAS reaches half of the bandwidth."""
    if (
        x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.numel() == x.shape[-1]
        and weight.numel() <= FEW
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    ):
        y = torch.linalg.vecdot(weight, x.view(-1))
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)
    return _linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None or x.dim() <= 2:
        return F.linear(x, weight, bias)
    # for more than two dimensions, DeepSpeed's product at ZeRO 3 adds the bias in place, to what a selective activation
    # checkpoint has stored
    return F.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def linear_together(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Return the result of each layer for the same x. All have a bias, or none has.

    torch.compile gets one product on a GPU, where it casts the weights to 16 bits, and thus copies them, in any case. A
    wrapper of a layer, such as PEFT's of an adapter, is called.
    """
    if x.is_cpu or not torch.compiler.is_compiling() or not are_linear(*layers):
        return tuple(layer(x) for layer in layers)
    return linear_joined(x, *layers)


def are_linear(*layers: nn.Module) -> bool:
    """Return whether the weights of the layers say what they compute: a wrapper with an adapter computes more."""
    return all(isinstance(layer, nn.Linear) for layer in layers)


def linear_joined(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Return the result of each layer as a slice of one product with their concatenated weights."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers]
    bias = None if biases[0] is None else torch.cat(biases)
    return F.linear(x, torch.cat(weights), bias).split([layer.out_features for layer in layers], dim=-1)


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, in the autocast dtype. On a GPU only gate and up are saved for the backward pass."""
    if gate.is_cpu or not torch.is_grad_enabled():
        return F.silu(gate) * up
    return GatedProduct.apply(gate, up)


def gated_projection(
    hidden: Tensor, gate: Tensor, up: Tensor, weight_df: Tensor, bias_d: Tensor | None = None
) -> Tensor:
    """Return hidden W^T + b, in the autocast dtype, where hidden is `gated_product(gate, up)`.

    On a GPU hidden is not saved for the backward pass. On a CPU, where memory is not scarce, it is, since to recompute
    it costs 5% to 11% of an MLP's time.
    """
    if gate.is_cpu or not torch.is_grad_enabled():
        return linear(hidden, weight_df, bias_d)
    return GatedProjection.apply(hidden, gate, up, weight_df, bias_d)


class GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return (F.silu(gate) * up).to(compute_dtype(gate))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad = grad.to(gate.dtype)
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class GatedProjection(torch.autograd.Function):
    """The backward pass recomputes hidden, which halves the memory of an MLP's activations."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, weight_df: Tensor, bias_d: Tensor | None) -> Tensor:
        dtype = compute_dtype(hidden)
        weight = weight_df.to(dtype)
        ctx.save_for_backward(gate, up, weight)
        ctx.dtypes = hidden.dtype, weight_df.dtype, None if bias_d is None else bias_d.dtype
        return _linear(hidden.to(dtype), weight, None if bias_d is None else bias_d.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        dtype, weight_dtype, bias_dtype = ctx.dtypes
        with no_autocast(gate):
            grad_hidden = (grad @ weight).to(dtype)
            hidden_rf = (F.silu(gate) * up).to(weight.dtype).flatten(0, -2)
            grad_weight = (grad.flatten(0, -2).mT @ hidden_rf).to(weight_dtype)
        grad_bias = None if bias_dtype is None else grad.flatten(0, -2).sum(0, dtype=bias_dtype)
        # those of gate and up are in grad_hidden
        return grad_hidden, None, None, grad_weight, grad_bias


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
        x32 = upcast(x)
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_d, scale)
        return (x32 * scale).mul_(weight_d).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_d, scale = ctx.saved_tensors
        y = upcast(x) * scale
        grad_weight = (grad * y).flatten(0, -2).sum(0).to(weight_d.dtype)
        grad_y = grad * upcast(weight_d)
        # if the backward pass runs inside autocast, it would round this product
        with no_autocast(x):
            mean = torch.linalg.vecdot(grad_y, y).div_(-x.shape[-1])[..., None]
        grad_x = grad_y.addcmul_(y, mean).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None
