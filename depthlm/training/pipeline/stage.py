"""A stage of `torch.distributed.pipelining` that receives only the tensors that its rank does not have.

The schedules of torch know stages that send what they computed to the next stage. This one also keeps what it received,
for the later chunks of its rank, in a memory that they share:

    chunk c - 1 --new tensors--> memory of the rank ----> chunk c, c + P, ...
               <--their gradients-- sums over these chunks <--'

Gradients take the same way back. A chunk reads a tensor of an earlier chunk as a leaf. Autograd adds up the gradients
of all chunks of the rank that read it, and of those behind them, in the gradient of that leaf. The backward pass of the
chunk for which it was received is the last of them, and sends the sum.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp, irecv, isend
from torch.distributed.pipelining.stage import _PipelineStageBase

from depthlm.config import Config
from depthlm.model import Decoder, Loss
from depthlm.model.decoder import Prefix
from depthlm.training.engine import autocast
from depthlm.training.pipeline.chunks import (
    Chunk,
    Route,
    Slot,
    Tensors,
    describe_cut,
    resume,
    slots_of,
    tensors_at,
)

# the leaves of a rank, by the number of their micro-batch
Memory = dict[int, Tensors]


class Stage(_PipelineStageBase):
    """A chunk of layers in a schedule. route: what is sent. memory: shared by the stages of a rank.

    factor: of the loss. sums: [nll, loss], summed over the tokens of all micro-batches; of the last chunk only.
    """

    def __init__(
        self,
        config: Config,
        model: Decoder,
        chunk: Chunk,
        chunks: int,
        device: torch.device,
        group: Any,
        memory: Memory,
        factor: float,
    ) -> None:
        super().__init__(model, chunk.number, chunks, device, group)
        self.config, self.model, self.chunk, self.memory, self.factor = config, model, chunk, memory, factor
        # torch's own description of what is received
        self.args_recv_info = {0: ()}

    def begin(self, route: Route) -> None:
        """Begin a batch."""
        self.route = route
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.incoming = route.sent[self.chunk.number]
        self.outgoing: list[Slot] = [] if self.chunk.is_last else route.sent[self.chunk.number + 1]
        # by micro-batch: what the chunk received, computed and opened, and the gradients of what it sent and received
        self.received: dict[int, Tensors] = {}
        self.outputs: dict[int, Tensors] = {}
        self.opened: dict[int, Tensors] = {}
        self.losses: dict[int, Loss] = {}
        self.returned: dict[int, Tensors] = {}
        self.gradients: dict[int, list[Tensor]] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Return the operations that receive the tensors of a micro-batch."""
        buffers = self.received[fwd_chunk_id] = {slot.key: slot.empty(self.device) for slot in self.incoming}
        return [self._p2p(irecv, buffer, -1) for buffer in buffers.values()]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Return the operations that send the tensors of a micro-batch."""
        return [
            self._p2p(isend, self.outputs[fwd_chunk_id][slot.key].detach().contiguous(), 1) for slot in self.outgoing
        ]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Return the operations that receive the gradients of what the chunk sent."""
        buffers = self.returned[bwd_chunk_id] = {slot.key: slot.empty(self.device) for slot in self.outgoing}
        return [self._p2p(irecv, buffer, 1) for buffer in buffers.values()]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Return the operations that send the gradients of what the chunk received."""
        return [self._p2p(isend, gradient, -1) for gradient in self.gradients.pop(bwd_chunk_id)]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: Any = None, save_forward_output: bool = True
    ) -> None:
        """Run the layers of a micro-batch. args: inputs_bt, targets_bt, and perhaps the seeds of dropout."""
        batch, (inputs, targets, *seeds), cuts = fwd_chunk_id, args, self.route.cuts
        memory = self.memory.setdefault(batch, {})
        memory |= {key: leaf_of(x) for key, x in self.received.pop(batch, {}).items()}
        with autocast(self.config, self.device):
            before = self.open_or_resume(inputs, cuts, memory, *seeds)
            if self.is_first:
                self.opened[batch] = tensors_at(self.model, cuts[0], before)
                memory |= {key: leaf_of(x) for key, x in self.opened[batch].items()}
            after, _ = self.model.run(inputs, before, self.chunk.end, seeds_b=seeds[0] if seeds else None)
            if not self.is_last:
                self.outputs[batch] = tensors_at(self.model, cuts[self.chunk.number + 1], after)
                return
            loss = self.losses[batch] = self.model.loss(self.model.close(after), targets)
            self.sums += torch.stack((loss.nll, loss.total(self.config.training.z_loss))).detach()

    def open_or_resume(self, inputs: Tensor, cuts: list[Any], known: Tensors, seeds_b: Tensor | None = None) -> Prefix:
        """Return the prefix before the chunk. known: at least the tensors that crossed the cut there."""
        if self.is_first:
            return self.model.run(inputs, until=0, seeds_b=seeds_b)[0]
        return resume(self.model, cuts[self.chunk.number], self.chunk.start, known)

    def rehearse(self, inputs: Tensor, cuts: list[Any]) -> list[Any]:
        """Describe the cut behind the chunk, of the first chunk also that before it. cuts: those before the chunk."""
        model, number = self.model, self.chunk.number
        known = {slot.key: leaf_of(slot.empty(self.device).zero_()) for cut in cuts[-1:] for slot in slots_of(cut)}
        with autocast(self.config, self.device):
            before, described = self.open_or_resume(inputs, cuts, known), []
            if self.is_first:
                described = [describe_cut(model, before, {}, -1)]
                known = tensors_at(model, described[0], before)
            after, _ = model.run(inputs, before, self.chunk.end)
            return [*described, describe_cut(model, after, {id(x): key for key, x in known.items()}, number)]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Add the gradients of the parameters, and compute those of what was received."""
        batch, memory = bwd_chunk_id, self.memory[bwd_chunk_id]
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if self.is_last:
            roots.append(self.losses.pop(batch).total(self.config.training.z_loss) * self.factor)
            gradients.append(None)
        outputs = self.outputs.pop(batch, {})
        for key, gradient in self.returned.pop(batch, {}).items():
            if (leaf := memory.get(key)) is not None:
                # another chunk has computed it
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
            elif outputs[key].requires_grad:
                roots.append(outputs[key])
                gradients.append(gradient)
        for key, x in self.opened.pop(batch, {}).items():
            leaf = memory.pop(key)
            if leaf.grad is not None and x.requires_grad:
                roots.append(x)
                gradients.append(leaf.grad)
        torch.autograd.backward(roots, gradients)
        leaves = [memory.pop(slot.key) for slot in self.incoming]
        self.gradients[batch] = [torch.zeros_like(x) if x.grad is None else x.grad.contiguous() for x in leaves]

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        """Prepare nothing: the route says what is received."""

    _prepare_backward_infra = _prepare_forward_infra

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple:
        return ()

    def _p2p(self, operation: Any, tensor: Tensor, step: int) -> P2POp:
        return P2POp(operation, tensor, self._resolve_peer_global_rank(self.stage_index + step), self.group)


def leaf_of(tensor: Tensor) -> Tensor:
    """Return a tensor of another chunk, as a leaf whose gradient autograd adds up."""
    leaf = tensor.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() and torch.is_grad_enabled() else leaf
