"""The cache interface of a decoder on top of a cache of transformers.

Shapes: b batch, t new tokens, s tokens in the cache and new, k key/value heads, e head size.
"""

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class StateLayer(DynamicLayer):
    """A layer of a transformers cache with a state of fixed size, which holds `length` tokens, in place of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.state: tuple[Tensor, ...] | None = None

    def get_seq_length(self) -> int:
        """Return the number of tokens that the state holds."""
        return self.length

    def reset(self) -> None:
        """Forget all tokens."""
        self.length, self.state = 0, None

    def crop(self, *_: int) -> None:
        """Raise NotImplementedError: a state cannot forget its last tokens."""
        raise NotImplementedError("a state cannot forget its last tokens, so assisted generation is not possible")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the state of another row for each row, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        if self.state is not None:
            self.state = tuple(x.index_select(0, indices.to(x.device)) for x in self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.state is not None:
            self.state = tuple(x.repeat_interleave(repeats, dim=0) for x in self.state)


class HeldCache:
    """The cache interface of a decoder, on top of a cache of transformers, which can also be reordered and cropped.

    length: tokens in the cache before this forward pass. document_b1: as in `KVCache`.
    """

    def __init__(self, held: Cache) -> None:
        self.held = held
        self.length = held.get_seq_length()
        self.document_b1: Tensor | None = None

    def update(self, slot: int, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens to a slot, and return all of its keys and values, k_bkse and v_bkse."""
        end = self.length + k_bkte.shape[2]
        k, v = self.held.update(k_bkte, v_bkte, slot)
        # a cache of fixed size also returns the empty positions
        return k[:, :, :end], v[:, :, :end]

    def state(self, slot: int) -> tuple[Tensor, ...] | None:
        """Return the state of a slot after the last cached token; None before the first one."""
        layer = self.held.layers[slot] if slot < len(self.held.layers) else None
        return layer.state if isinstance(layer, StateLayer) else None

    def set_state(self, slot: int, state: tuple[Tensor, ...]) -> None:
        """Keep the state of a slot after the new tokens."""
        layers = self.held.layers
        layers += [DynamicLayer() for _ in range(slot + 1 - len(layers))]
        if not isinstance(layers[slot], StateLayer):
            layers[slot] = StateLayer()
        layers[slot].state = state

    def advance(self, tokens: int, document_b1: Tensor | None = None) -> None:
        """Count the tokens of states: transformers counts those of keys. `CausalLM.ends` finds documents each time."""
        for layer in self.held.layers:
            if isinstance(layer, StateLayer):
                layer.length += tokens

    def ends_of_text(self, ends_bt: Tensor, slot: int) -> Tensor:
        """Return ends_bs of all tokens so far. They have their own cache slot, so beam search reorders them too."""
        if len(self.held.layers) == slot:
            self.held.layers.append(DynamicLayer())
        ends_b1t1 = ends_bt[:, None, :, None]
        return self.held.update(ends_b1t1, ends_b1t1, slot)[0][:, 0, :, 0]
