"""Generate tokens with a decoder, one at a time.

Shapes: b batch, t tokens, v vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlm.model.attention.context import Cache
from depthlm.model.decoder import Decoder


class Sampling(NamedTuple):
    """How the next token is chosen.

    temperature: 0 takes the most likely token; else the logits are divided by it before sampling.
    top_k, top_p: sample only from the k most likely tokens, or from the fewest whose probabilities reach p
        (arXiv 1904.09751).
    generator: on the device of the tokens.
    vocab_size: choose only ids below it, since a tokenizer has no text for those with which a vocabulary is padded.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None
    vocab_size: int | None = None


def generate(model: Decoder, tokens_bt: Tensor, max_new_tokens: int, **settings: Any) -> Tensor:
    """Return the prompt and its continuation, up to t + max_new_tokens tokens; fewer if every row has ended.

    settings: those of `stream`. Raises the errors of `stream`.
    """
    return torch.cat([tokens_bt, *stream(model, tokens_bt, max_new_tokens, **settings)], dim=1)


@torch.inference_mode()
def stream(
    model: Decoder,
    tokens_bt: Tensor,
    max_new_tokens: int,
    *,
    use_cache: bool = True,
    eos: int | None = None,
    padding_b: Tensor | None = None,
    prefill_chunk: int | None = None,
    **sampling: Any,
) -> Iterator[Tensor]:
    """Yield the tokens after the prompt one by one, [b, 1] each, until every row has ended, as inference tensors.

    eos: a row ends after this token and is then filled with it.
    padding_b: number of padding tokens on the left of each row; they do not affect the continuation.
    prefill_chunk: as `chunk` of `prefill`; needs the cache.
    sampling: the fields of `Sampling`.
    Raises ValueError for an empty prompt, a negative temperature, top_k or prefill_chunk below 1, a chunk without a
    cache, or top_p outside (0, 1].
    """
    start = tokens_bt.shape[1]
    if start == 0 or (padding_b is not None and bool((padding_b >= start).any())):
        raise ValueError("the prompt is empty: give at least one token")
    settings = Sampling(**sampling)
    temperature, top_k, top_p, *_ = settings
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature} >= 0, top_k {top_k} >= 1 and 0 < top_p {top_p} <= 1 must hold")
    if prefill_chunk is not None and (prefill_chunk < 1 or not use_cache):
        raise ValueError(f"prefill_chunk {prefill_chunk} >= 1 and use_cache must hold")
    cache = model.make_cache(start + max_new_tokens) if use_cache else None
    ended_b1 = torch.zeros_like(tokens_bt[:, :1], dtype=torch.bool)
    input_bt = tokens_bt
    for _ in range(max_new_tokens):
        ends_bt = None
        if padding_b is not None and (cache is None or cache.length == 0):
            ends_bt = torch.arange(input_bt.shape[1], device=input_bt.device) < padding_b[:, None]
            if model.end_of_text is not None:
                ends_bt = ends_bt | model.ends_of_documents(input_bt == model.end_of_text)
        logits_bv = prefill(model, input_bt, cache, prefill_chunk, ends_bt)
        new_b1 = _choose(logits_bv.float(), settings)
        if eos is not None:
            new_b1 = new_b1.masked_fill(ended_b1, eos)
            ended_b1 = ended_b1 | (new_b1 == eos)
        yield new_b1
        if eos is not None and bool(ended_b1.all()):
            return
        input_bt = new_b1 if use_cache else torch.cat((input_bt, new_b1), dim=1)


def prefill(
    model: Decoder, tokens_bt: Tensor, cache: Cache | None, chunk: int | None = None, ends_bt: Tensor | None = None
) -> Tensor:
    """Return logits_bv after the last token. The cache gets the keys and values, or states, of all tokens.

    chunk: tokens per forward pass; None: all at once. The logits are the same, but activations, and what a mechanism
        retains of each token beside the cache, exist for only one chunk at a time. Needs a cache.
    ends_bt: as in `Decoder.forward`.
    """
    length = tokens_bt.shape[1]
    for start in range(0, length, chunk or length):
        part = slice(start, start + (chunk or length))
        # a whole forward pass: at ZeRO 3, the weights outside of layers exist only in it
        of_part = None if ends_bt is None else ends_bt[:, part]
        logits_b1v = model(tokens_bt[:, part], cache=cache, ends_bt=of_part, last_only=True)
    return logits_b1v[:, 0]


def _choose(logits_bv: Tensor, settings: Sampling) -> Tensor:
    temperature, top_k, top_p, generator, vocab_size = settings
    logits_bv = logits_bv[:, :vocab_size]
    # a division by what fp32 has no normal number for would give nan
    if temperature < torch.finfo(torch.float32).tiny:
        return logits_bv.argmax(dim=-1, keepdim=True)
    sorted_bv, index_bv = ((logits_bv - logits_bv.amax(-1, keepdim=True)) / temperature).sort(dim=-1, descending=True)
    if top_k is not None:
        sorted_bv[:, top_k:] = -torch.inf
    probabilities_bv = sorted_bv.softmax(dim=-1)
    if top_p is not None:
        before_bv = probabilities_bv.cumsum(dim=-1) - probabilities_bv
        probabilities_bv = probabilities_bv.masked_fill(before_bv >= top_p, 0.0)
    return index_bv.gather(1, torch.multinomial(probabilities_bv, 1, generator=generator))
