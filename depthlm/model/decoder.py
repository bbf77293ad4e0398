"""The decoder: embedding, layers, head.

Shapes: b batch, t tokens, d hidden size, v vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from depthlm.model.attention import build_mixers
from depthlm.model.attention.context import AttentionContext, Cache, KVCache, find_documents
from depthlm.model.attention.self_attention import AttentionFactory, DepthKV, SelfAttention
from depthlm.model.connection import Connection, ConnectionFactory, State
from depthlm.model.edges import Edit
from depthlm.model.experts import Mixture, Routing
from depthlm.model.layer import UNOBSERVED, Layer, Observer
from depthlm.model.layers import Embedding, Head, Norm, rope_tables
from depthlm.model.parameters import Factors
from depthlm.model.shape import Backbone, Size, SublayerSpec
from depthlm.ops.backend import fused, using
from depthlm.ops.dropout import Dropout, apply_dropout
from depthlm.ops.dtypes import compute_dtype

# recompute everything but matrix products and attention over the sequence
SELECTIVE = "selective"


class Loss(NamedTuple):
    """Sums over all targets that are not -100; micro-batches and ranks add them up.

    nll: -log p(target), in nats. z: logsumexp(logits)^2. tokens: the number of these targets. penalty: the auxiliary
    loss of the experts, times that number. routing: of all layers with experts, each loop again; None without experts.
    """

    nll: Tensor
    z: Tensor
    tokens: Tensor
    penalty: Tensor | None = None
    routing: Routing | None = None

    def total(self, z_loss: float) -> Tensor:
        """Return the loss to minimize, summed over the tokens. z_loss: the weight of z."""
        loss = self.nll + z_loss * self.z if z_loss else self.nll
        return loss if self.penalty is None else loss + self.penalty


class Prefix(NamedTuple):
    """What a forward pass has computed before an unrolled layer, or with position L before the final read."""

    position: int
    state: State
    depth: DepthKV


class Decoder(nn.Module):
    """A decoder language model with a depth mechanism.

        tokens_bt -> embedding -> open -> [layer] * L * loops -> close -> final_norm -> head -> logits_btv

    connection, attention: factories, called with (spec, size, backbone); attention for layers with keys and values.
    loops: the number of passes through the same layers. Each pass has its own connections.
    activation_checkpointing: what the backward pass recomputes (see `recompute_layer`).
    kernels: the implementation of the operators over depth: auto, triton or torch (`depthlm.ops.backend`).
    fp32_residual: whether the residual stream, and the streams and sums of a mechanism, stay in fp32 under autocast;
        otherwise they have the dtype of matrix products.
    end_of_text: the token that ends a document. With it, tokens attend only within their document and positions start
        at 0 in each document, so the logits equal those of the document alone. None: each sequence is one document.
    end_of_text_begins: whether that token belongs to the document after it, as its BOS token.
    max_documents: the most documents that all sequences of a batch together have; None: unknown, so that the host waits
        for a GPU to count them.
    factors: of each parameter, by its name, in another parametrization than the standard one
        (`depthlm.optimizers.parametrization`); else empty.
    """

    def __init__(
        self,
        size: Size,
        backbone: Backbone,
        connection: ConnectionFactory,
        attention: AttentionFactory,
        loops: int = 1,
    ):
        super().__init__()
        self.size = size
        self.backbone = backbone
        self.loops = loops
        self.activation_checkpointing: bool | int | str = False
        self.is_compiled = False
        self.kernels = "auto"
        self.fp32_residual = False
        self.factors: dict[str, Factors] = {}
        self.end_of_text: int | None = None
        self.end_of_text_begins = False
        self.max_documents: int | None = None
        self.head_and_loss: Callable[[Decoder, Tensor, Tensor, bool], Loss] = head_and_loss
        depth = loops * size.num_layers
        specs = [SublayerSpec(layer, kind, depth) for layer in range(depth) for kind in ("attention", "mlp")]
        self.embedding = Embedding(size, backbone)
        specs.append(SublayerSpec(depth, "final", depth))
        connections = [connection(spec, size, backbone) for spec in specs]
        for each in connections:
            each.link(connections)
        # of each sublayer, in the loop with the most
        inputs = [
            max(c.num_inputs for c in connections[i : -1 : 2 * size.num_layers]) for i in range(2 * size.num_layers)
        ]
        layers = [
            Layer(i, mixer, size, backbone, (inputs[2 * i], inputs[2 * i + 1]))
            for i, mixer in enumerate(build_mixers(size, backbone, attention, loops))
        ]
        for i, layer in enumerate(layers):
            layer.set_output_gain(connections[2 * i].output_gain, connections[2 * i + 1].output_gain)
        self.connections = cast(Sequence[Connection], nn.ModuleList(connections))
        self.layers = cast(Sequence[Layer], nn.ModuleList(layers))
        self.final_norm = Norm(size.hidden_size, backbone)
        self.head = Head(size, backbone)

    def forward(
        self,
        tokens_bt: Tensor,
        targets_bt: Tensor | None = None,
        cache: Cache | None = None,
        observer: Observer = UNOBSERVED,
        ends_bt: Tensor | None = None,
        seeds_b: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor | Loss:
        """Return logits_btv, or with targets the summed loss. Targets of -100 are ignored.

        cache: keys and values, or states, of the preceding tokens. Those of the new tokens are added.
        observer: receives the inputs and outputs of each sublayer.
        ends_bt: true where a token is the last of its document, such as the last padding token to the left of a prompt;
            None: see `ends_of_documents`.
        seeds_b: int32, for `backbone.dropout` in training, one per sequence; None: no dropout.
        last_only: return logits_b1v of the last token alone.
        """
        prefix, routings = self.run(tokens_bt, cache=cache, observer=observer, ends_bt=ends_bt, seeds_b=seeds_b)
        hidden_btd = self.close(prefix, observer)
        if targets_bt is None:
            with using(self.kernels):
                return self.logits(hidden_btd[:, -1:] if last_only else hidden_btd)
        loss = self.loss(hidden_btd, targets_bt)
        if not routings:
            return loss
        routing = Routing(*map(torch.stack, zip(*routings, strict=True)))
        return loss._replace(penalty=routing.penalty(self.backbone) * loss.tokens, routing=routing)

    def hidden(
        self,
        tokens_bt: Tensor,
        cache: Cache | None = None,
        observer: Observer = UNOBSERVED,
        ends_bt: Tensor | None = None,
        after: Prefix | None = None,
    ) -> Tensor:
        """Return hidden_btd before the final norm. after: begin there, with what was computed for the same tokens."""
        prefix, _ = self.run(tokens_bt, after, cache=cache, observer=observer, ends_bt=ends_bt)
        return self.close(prefix, observer)

    def close(self, prefix: Prefix, observer: Observer = UNOBSERVED) -> Tensor:
        """Return hidden_btd before the final norm, after the last layer."""
        observer.layer(prefix.position, prefix.state, prefix.depth)
        observer.read(self.connections[-1], prefix.state)
        with using(self.kernels):
            return self.connections[-1].close(prefix.state)

    def loss(self, hidden_btd: Tensor, targets_bt: Tensor) -> Loss:
        """Return the summed loss of hidden_btd before the final norm, without the penalty of experts."""
        with using(self.kernels):
            by_kernels = fused("cross_entropy", [hidden_btd])
        return self.head_and_loss(self, hidden_btd, targets_bt, by_kernels)

    def run(
        self,
        tokens_bt: Tensor,
        after: Prefix | None = None,
        until: int | None = None,
        cache: Cache | None = None,
        observer: Observer = UNOBSERVED,
        ends_bt: Tensor | None = None,
        seeds_b: Tensor | None = None,
    ) -> tuple[Prefix, list[Routing]]:
        """Run the unrolled layers before `until`, by default all; return what they computed, and the routings.

        after: begin there, with what was computed for the same tokens.
        """
        start, length = cache.length if cache is not None else 0, tokens_bt.shape[1]
        cached_b1 = cache.document_b1 if cache is not None else None
        if ends_bt is None and self.end_of_text is not None:
            ends_bt = self.ends_of_documents(tokens_bt == self.end_of_text)
            if self.end_of_text_begins and cached_b1 is not None:
                cached_b1 = torch.where(tokens_bt[:, :1] == self.end_of_text, start, cached_b1)
        elif ends_bt is None and cached_b1 is not None:
            ends_bt = torch.zeros_like(tokens_bt, dtype=torch.bool)
        documents, document_b1 = None, None
        if ends_bt is None:
            positions = torch.arange(start, start + length, device=tokens_bt.device)
        else:
            positions, documents, document_b1 = find_documents(ends_bt, start, cached_b1, self.max_documents)
        rope = None
        if self.backbone.position == "rope":
            rope = rope_tables(positions, self.size.head_size, self.backbone.rope_theta)
        dropout = Dropout(self.backbone.dropout, seeds_b) if self.backbone.dropout and seeds_b is not None else None
        with using(self.kernels):
            if after is None:
                embedding_btd = apply_dropout(self.embedding(tokens_bt, positions), dropout, 0)
                if not self.fp32_residual:
                    embedding_btd = embedding_btd.to(compute_dtype(embedding_btd))
                observer.open(embedding_btd)
                _, attention = self.next_attention(0)
                depth = [] if attention is None else attention.open_depth()
                after = Prefix(0, self.connections[0].open(embedding_btd), depth)
            (first, state, depth), routings = after, []
            until = self.loops * self.size.num_layers if until is None else until
            for position in range(first, until):
                observer.layer(position, state, depth)
                layer = recompute_layer(
                    self.layers[position % self.size.num_layers], position, self.activation_checkpointing, self.kernels
                )
                connections = self.connections[2 * position], self.connections[2 * position + 1]
                context = AttentionContext(
                    documents, cache, position, None if dropout is None else dropout.at(position + 1)
                )
                state, depth, routing = layer(state, depth, connections, rope, context, observer)
                routings += [routing] if routing is not None else []
            if cache is not None:
                cache.advance(length, document_b1)
            return Prefix(until, state, depth), routings

    def next_attention(self, position: int) -> tuple[int, SelfAttention | None]:
        """Return the first unrolled layer from a position on that reads the depth list, and its attention."""
        depth = self.loops * self.size.num_layers
        for number in range(position, depth):
            if isinstance(attention := self.layers[number % self.size.num_layers].attention, SelfAttention):
                return number, attention
        return depth, None

    def tensors_to_send(self, prefix: Prefix) -> list[Tensor]:
        """Return the tensors of a prefix that later layers need, which a pipeline sends to them."""
        _, attention = self.next_attention(prefix.position)
        of_depth = [] if attention is None else attention.retained(prefix.depth)
        return self.connections[2 * prefix.position].retained(prefix.state) + of_depth

    def mask_documents(self, mask_mode: bool | Literal["bos"], end_of_text: int) -> None:
        """Limit attention to documents as `data.document_mask` says."""
        self.end_of_text, self.end_of_text_begins = end_of_text if mask_mode else None, mask_mode == "bos"

    def ends_of_documents(self, of_text_bt: Tensor) -> Tensor:
        """Return where a token is the last of its document. of_text_bt: where it is end_of_text."""
        return F.pad(of_text_bt[:, 1:], (0, 1)) if self.end_of_text_begins else of_text_bt

    def mixtures(self) -> list[Mixture]:
        """Return the mixtures of experts, in the order of layers."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Mixture)]

    def checkpoint_activations(self, recompute: bool | int | str = True) -> None:
        """Recompute activations in the backward pass (see `recompute_layer`), and call `read_alone`.

        Values that are read ahead would otherwise be stored between all layers. recompute: False: nothing is done.
        """
        self.activation_checkpointing = recompute
        if recompute:
            self.read_alone()

    def read_alone(self) -> None:
        """Make every connection read with its own parameters only, as required where parameters are sharded."""
        for connection in self.connections:
            connection.link([connection])

    def edit_edges(self, edit: Edit | None) -> None:
        """Let `edit` change the weights of all reads over depth. None: undo it."""
        for connection in self.connections:
            connection.edit = edit
        for layer in self.layers:
            if isinstance(layer.attention, SelfAttention):
                layer.attention.edit = edit

    def logits(self, hidden_btd: Tensor) -> Tensor:
        """Return logits_btv."""
        return self.head(self.final_norm(hidden_btd), self._tied_weight())

    def losses(self, hidden_btd: Tensor, targets_bt: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        """Return nll_r and logsumexp_r of all r = b * t tokens, without the full logits of a large batch in memory.

        The nll of a target of -100 is undefined and must get no gradient.
        """
        return self.head(self.final_norm(hidden_btd), self._tied_weight(), targets_bt.flatten(), fused)

    def _tied_weight(self) -> Tensor | None:
        # an untied head must not read the embedding matrix: with sharded weights each read costs an all-gather
        return self.embedding.weight if self.backbone.tie_embeddings else None

    def make_cache(self, max_length: int = 256) -> KVCache:
        """Return an empty cache for this decoder, with an initial capacity of max_length tokens."""
        return KVCache(self.loops * self.size.num_layers, max_length)


def head_and_loss(model: Decoder, hidden_btd: Tensor, targets_bt: Tensor, fused: bool) -> Loss:
    """Return the summed loss of hidden_btd, which is before the final norm."""
    nll, logsumexp = model.losses(hidden_btd, targets_bt, fused)
    counted = targets_bt.flatten() != -100
    z = logsumexp.square()
    return Loss(nll.where(counted, 0).sum(), z.where(counted, 0).sum(), counted.sum())


def recompute_layer(layer: Callable, position: int, recompute: bool | int | str, kernels: str) -> Callable:
    """Return a layer whose activations are recomputed in the backward pass (arXiv 1604.06174), or the layer itself.

    recompute: True: every layer; n: layers 0, n, 2n, ... by their position; "selective": every layer, but its matrix
    products and attention over the sequence are stored; False: no layer.
    """
    if not recompute or not torch.is_grad_enabled():
        return layer
    if recompute != SELECTIVE and position % int(recompute):
        return layer
    contexts = _selective if recompute == SELECTIVE else _contexts
    # a capture cannot read the state of the generator; layers that draw from it are not captured
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    context_fn = partial(contexts, kernels)
    return partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=not capturing, context_fn=context_fn)


def _contexts(kernels: str) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a layer's forward pass and of its recomputation, which runs outside `Decoder.hidden`."""
    return nullcontext(), using(kernels)


def _selective(kernels: str) -> tuple[AbstractContextManager, AbstractContextManager]:
    forward, again = create_selective_checkpoint_contexts(stored_operators())
    return _without_cache(nullcontext(), forward), _without_cache(using(kernels), again)


@contextmanager
def _without_cache(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    """Enter two contexts, without autocast's cache of cast weights.

    A later loop would take the cast of an earlier one from the cache, and its recomputation would not find it there.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with outer, inner:
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def stored_operators() -> list[Any]:
    """Return the operators whose results are stored: matrix products, and attention over a sequence."""
    aten = torch.ops.aten
    names = (
        "mm",
        "addmm",
        "_grouped_mm",
        "_flash_attention_forward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]
