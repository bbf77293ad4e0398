"""The interface between training and the library that computes gradients and updates on one or more ranks.

The training loop, checkpoints and benchmarks use nothing else of an engine, so that another library is one more file
beside deepspeed.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from depthlm.model import Decoder, Loss, Observer
from depthlm.model.layer import UNOBSERVED


def copy_to_cpu(_: str, tensor: Tensor) -> Tensor:
    """Return a copy of a weight on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class Engine(Protocol):
    """A model with its optimizer, ready to train. model: the decoder, whose weights may be sharded over the ranks."""

    model: Decoder

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    @property
    def fp16(self) -> bool:
        """Whether the engine scales the loss for fp16."""
        ...

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without fp16."""
        ...

    def __call__(
        self, inputs: Tensor, targets: Tensor, observer: Observer = UNOBSERVED, seeds_b: Tensor | None = None
    ) -> Loss:
        """Run the forward pass of a micro-batch [micro_batch, T]. seeds_b: for dropout, one per sequence."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch. The engine divides by the accumulation steps and averages over ranks."""
        ...

    def unreduced(self) -> AbstractContextManager[None]:
        """Return a context in which `backward` leaves the gradients of this rank as they are; for ZeRO 0 only."""
        ...

    def reduce(self) -> None:
        """Average the gradients over ranks after the last micro-batch of a batch, as `backward` does outside of it."""
        ...

    def step(self, nll: Tensor | None = None, skip: Tensor | None = None) -> float:
        """End a micro-batch. After the last of a batch, clip the gradient and update the weights if it is finite.

        nll: a number on the device, which is read together with the norm of the gradient, and returned.
        skip: whether to skip the update; at ZeRO 1 and above, a loss of NaN skips it instead.
        """
        ...

    def step_applied(self) -> bool:
        """Return whether the last update was applied; it is skipped if the gradient is not finite."""
        ...

    def grad_norm(self) -> float | None:
        """Return the global gradient norm of the last step, before clipping."""
        ...

    def nonfinite(self) -> str | None:
        """Name a weight or a state of the optimizer on this rank that is not finite; None if there is none."""
        ...

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every parameter group to `lr` times the group's `lr_scale`."""
        ...

    def state(self, checkpoint: Path) -> dict[Path, Any]:
        """Return the contents of this rank's files of a checkpoint by path, without writing them; collective.

        `torch.save` writes each of them. They alias the state, which the next step changes.
        """
        ...

    def weights(self, keep: Callable[[str, Tensor], Tensor] = copy_to_cpu) -> dict[str, Tensor]:
        """Return the full weights by name, each copied by `keep`; collective, and empty on all ranks but rank 0.

        They are those of `evaluated`.
        """
        ...

    def evaluated(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are evaluated and exported; collective.

        These are other weights than those in training only for an optimizer that averages the weights.
        """
        ...

    def load_state(self, checkpoint: Path, saved_experts: int | None = None) -> None:
        """Load weights, optimizer and engine state from a checkpoint; collective. Raises CheckpointError.

        The optimizer groups keep the settings of the engine. saved_experts: for a checkpoint that must be
        repartitioned, over how many ranks it spreads the experts; None: the ranks are those that wrote it.
        """
        ...

    def destroy(self) -> None:
        """Release the model; the engine cannot be used afterwards."""
        ...
