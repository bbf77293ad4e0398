"""A decoder with the interface of transformers: its config.json, `forward` and `generate`, with transformers' cache.

Shapes: b batch, t new tokens, s tokens in the cache and new, v vocabulary, k key/value heads, e head size.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthlm.mechanisms.residual import Residual
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.connection import Connection
from depthlm.model.decoder import Decoder
from depthlm.model.parameters import initialize
from depthlm.model.shape import Backbone, Size

UNSUPPORTED = ("position_ids", "inputs_embeds", "output_attentions", "output_hidden_states")
# those that the configuration may have, as from_pretrained(..., output_hidden_states=True) sets it
UNSUPPORTED_SETTINGS = ("output_attentions", "output_hidden_states")


class DepthLMConfig(PretrainedConfig):
    """Size, backbone and depth mechanism of a decoder, and the standard fields that tools expect, derived from them.

    size, backbone: the fields of `Size` and `Backbone`. loops: passes through the layers.
    mechanism: its name. connection, attention: the settings of the two classes that the modeling code names.
    end_of_text, end_of_text_begins: those of `Decoder`.
    max_position_embeddings: sequence length of training; longer sequences are possible, since positions are computed.
    """

    model_type = "depthlm"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        size: dict[str, Any] | None = None,
        backbone: dict[str, Any] | None = None,
        loops: int = 1,
        mechanism: str = "",
        connection: dict[str, Any] | None = None,
        attention: dict[str, Any] | None = None,
        end_of_text: int | None = None,
        end_of_text_begins: bool = False,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.size, self.backbone, self.loops = size or {}, backbone or {}, loops
        self.mechanism, self.connection, self.attention = mechanism, connection or {}, attention or {}
        self.end_of_text, self.end_of_text_begins = end_of_text, end_of_text_begins
        self.max_position_embeddings, self.use_cache = max_position_embeddings, use_cache
        # transformers also calls the constructor without arguments
        if size:
            # a cache has one layer for each pass through a layer
            kwargs["num_hidden_layers"] = loops * size["num_layers"]
            kwargs |= {key: size[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
            kwargs |= {"num_attention_heads": size["num_heads"], "num_key_value_heads": size["num_kv_heads"]}
            kwargs |= {"head_dim": size["head_size"], "initializer_range": size["init_std"]}
        if backbone:
            kwargs["tie_word_embeddings"] = backbone["tie_embeddings"]
        super().__init__(**kwargs)


class StateLayer(DynamicLayer):
    """A layer of a transformers cache with a state of fixed size, which holds `length` tokens, in place of keys."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.state: tuple[Tensor, ...] | None = None

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.length, self.state = 0, None

    def crop(self, *_: int) -> None:
        raise NotImplementedError("a state cannot forget its last tokens, so assisted generation is not possible")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = tuple(x.index_select(0, indices.to(x.device)) for x in self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = tuple(x.repeat_interleave(repeats, dim=0) for x in self.state)


class DecoderCache:
    """The cache interface of a decoder, on top of a cache of transformers, which can also be reordered and cropped.

    length: tokens in the cache before this forward pass. document_b1: as in `KVCache`.
    """

    def __init__(self, inner: Cache) -> None:
        self.inner = inner
        self.length = inner.get_seq_length()
        self.document_b1: Tensor | None = None

    def update(self, slot: int, k_bkte: Tensor, v_bkte: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens to a slot, and return all of its keys and values, k_bkse and v_bkse."""
        end = self.length + k_bkte.shape[2]
        k, v = self.inner.update(k_bkte, v_bkte, slot)
        # a cache of fixed size also returns the empty positions
        return k[:, :, :end], v[:, :, :end]

    def state(self, slot: int) -> tuple[Tensor, ...] | None:
        """Return the state of a slot after the last cached token; None before the first one."""
        layer = self.inner.layers[slot] if slot < len(self.inner.layers) else None
        return layer.state if isinstance(layer, StateLayer) else None

    def set_state(self, slot: int, state: tuple[Tensor, ...]) -> None:
        """Keep the state of a slot after the new tokens."""
        layers = self.inner.layers
        layers += [DynamicLayer() for _ in range(slot + 1 - len(layers))]
        if not isinstance(layers[slot], StateLayer):
            layers[slot] = StateLayer()
        layers[slot].state = state

    def advance(self, tokens: int, document_b1: Tensor | None = None) -> None:
        """Count the tokens of states: transformers counts those of keys. `CausalLM.ends` finds documents each time."""
        for layer in self.inner.layers:
            if isinstance(layer, StateLayer):
                layer.length += tokens

    def ends_of_text(self, ends_bt: Tensor, slot: int) -> Tensor:
        """Return ends_bs of all tokens so far. They have their own cache slot, so beam search reorders them too."""
        if len(self.inner.layers) == slot:
            self.inner.layers.append(DynamicLayer())
        ends_b1t1 = ends_bt[:, None, :, None]
        return self.inner.update(ends_b1t1, ends_b1t1, slot)[0][:, 0, :, 0]


class CausalLM(PreTrainedModel, GenerationMixin):
    """Wraps a decoder, which is built from the configuration if none is given.

    input_ids, attention_mask -> decoder -> logits_btv

    connection_class, attention_class: set by a subclass to the classes of its mechanism.
    """

    config_class = DepthLMConfig
    base_model_prefix = "decoder"
    _no_split_modules = ["Decoder"]  # noqa: RUF012
    # `from_pretrained(dtype=...)` would round them; the steps of the bias of a router are below bf16's
    _keep_in_fp32_modules_strict = ["bias_e", "A_log", "dt_bias"]  # noqa: RUF012
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    connection_class: type[Connection] = Residual
    attention_class: type[SelfAttention] = SelfAttention

    def __init__(self, config: DepthLMConfig, decoder: Decoder | None = None) -> None:
        super().__init__(config)
        if decoder is None:
            connection = partial(self.connection_class, **config.connection)
            attention = partial(self.attention_class, **config.attention)
            size, backbone = Size(**config.size), Backbone(**config.backbone)
            decoder = Decoder(size, backbone, connection, attention, config.loops)
            if decoder.embedding.weight.device.type != "meta":
                initialize(decoder, torch.initial_seed(), size.init_std, backbone=backbone)
        decoder.end_of_text, decoder.end_of_text_begins = config.end_of_text, config.end_of_text_begins
        self.decoder = decoder
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Return logits_btv and, with labels, the mean loss of the next token in nats (a label of -100 is ignored).

        attention_mask: [b, s], 0 for padding, which may be before or after a row's tokens and does not affect their
            logits. None: no padding.
        logits_to_keep: compute the logits of only this many last tokens, or of these tokens; 0: of all.
        kwargs: for the loss, such as num_items_in_batch. Raises ValueError for unsupported arguments.
        """
        for name in UNSUPPORTED:
            value = kwargs.pop(name, None)
            if value is None and name in UNSUPPORTED_SETTINGS:
                value = getattr(self.config, name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name}: a depthlm model does not take it; positions follow from attention_mask")
        if self.gradient_checkpointing and torch.is_grad_enabled():
            if past_key_values is not None:
                raise ValueError("past_key_values: gradient checkpointing would add the keys of each token twice")
            use_cache = False
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        cache = None if past_key_values is None else DecoderCache(past_key_values)
        ends_bt = self.ends(input_ids, attention_mask, cache)
        hidden_btd = self.decoder.hidden(input_ids, cache, ends_bt=ends_bt)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_btv = self.decoder.logits(hidden_btd[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_btv, labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits_btv, past_key_values=past_key_values)
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    def ends(self, tokens_bt: Tensor, mask_bs: Tensor | None, cache: DecoderCache | None) -> Tensor | None:
        """Return ends_bt of `Decoder.forward`; None if each row is one document.

        If the cached tokens contain several documents, this also sets where the newest of them begins in the cache.
        """
        start = 0 if cache is None else cache.length
        ends_bs = padding(mask_bs, start + tokens_bt.shape[1])
        if self.decoder.end_of_text is not None:
            of_text_bs = tokens_bt == self.decoder.end_of_text
            if cache is not None:
                of_text_bs = cache.ends_of_text(of_text_bs, self.config.num_hidden_layers)
            ends_of_text_bs = self.decoder.ends_of_documents(of_text_bs)
            ends_bs = ends_of_text_bs if ends_bs is None else ends_bs | ends_of_text_bs
        if ends_bs is None:
            return None
        if cache is not None and start:
            after_s = torch.arange(1, start + 1, device=tokens_bt.device)
            cache.document_b1 = torch.where(ends_bs[:, :start], after_s, 0).amax(dim=1, keepdim=True)
        return ends_bs[:, start:]

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, whose matrix a tied head also uses."""
        return self.decoder.embedding

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Change the size of the vocabulary, of embedding and head, and return the embedding.

        new_num_tokens: None: as many as there are. pad_to_multiple_of: round this number up to a multiple.
        mean_resizing: whether new rows are the mean of all rows; if not, they are normal like initial ones.
        """
        old = self.config.vocab_size
        wanted, multiple = old if new_num_tokens is None else new_num_tokens, pad_to_multiple_of or 1
        size = replace(self.decoder.size, vocab_size=-(-wanted // multiple) * multiple)
        head = self.decoder.head
        for module, name in ((self.decoder.embedding, "weight"), (head, "weight"), (head, "bias")):
            if (parameter := getattr(module, name)) is not None:
                rows = resize_rows(parameter.data, size.vocab_size, None if mean_resizing else size.init_std)
                setattr(module, name, nn.Parameter(rows, parameter.requires_grad))
        self.decoder.size, self.config.size = size, asdict(size)
        self.config.vocab_size = size.vocab_size
        if (generation := self.generation_config) is not None:
            suppressed = generation.suppress_tokens or []
            # the ids with which the vocabulary was padded are those of tokens that were added, or padding still
            padding = next(id for id in range(old, -1, -1) if id - 1 not in suppressed)
            begin = padding if new_num_tokens is None else wanted
            kept = [id for id in suppressed if id < min(padding, begin)]
            generation.suppress_tokens = [*kept, *range(begin, size.vocab_size)] or None
        return self.decoder.embedding

    def _set_gradient_checkpointing(self, enable: bool = True, every_n_layers: int = 1, **_: Any) -> None:
        self.gradient_checkpointing = enable
        self.decoder.checkpoint_activations(every_n_layers if enable else False)

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, since the constructor has initialized the weights."""


def resize_rows(rows: Tensor, count: int, std: float | None) -> Tensor:
    """Return the first `count` rows, or all and new ones: normal(0, std), or their mean if std is None."""
    new = rows.new_empty(max(0, count - len(rows)), *rows.shape[1:])
    new = rows.mean(0).expand_as(new) if std is None else new.normal_(0, std)
    return torch.cat((rows[:count], new))


def padding(mask_bs: Tensor | None, length: int) -> Tensor | None:
    """Return which tokens are padding; None if none is. Raises ValueError for any mask that is not a padding mask."""
    if mask_bs is None or bool(mask_bs.all()):
        return None
    if mask_bs.dim() != 2 or mask_bs.shape[1] != length:
        raise ValueError(
            f"attention_mask {list(mask_bs.shape)}: must be [batch, {length}], for the cached and the new tokens; "
            "a mask with four dimensions comes from a static cache, which a depthlm model does not support"
        )
    real_bs = mask_bs != 0
    begins_bs = real_bs[:, 1:] & ~real_bs[:, :-1]
    if bool((begins_bs.sum(dim=1) + real_bs[:, 0] > 1).any()):
        raise ValueError("attention_mask: a row has padding between its tokens; pad prompts on the left")
    return ~real_bs
