"""Text from a decoder, one token at a time.

Shapes: b batch, t tokens, v vocabulary.
"""

import torch
from torch import Tensor

from depthlm.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    tokens_bt: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    eos: int | None = None,
) -> Tensor:
    """The prompt and what follows it, tokens_bt of t + max_new_tokens tokens, or fewer if every row has ended.

    temperature: 0 takes the most likely token; else logits are divided by it and sampled from.
    top_k, top_p: sample only from the k most likely, or from the fewest whose probabilities reach p (arXiv 1904.09751).
    generator: on the device of the tokens. eos: a row ends after this token, and is filled up with it.
    Raises: ValueError for an empty prompt, a negative temperature, top_k below 1 or top_p outside (0, 1].
    """
    if tokens_bt.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token")
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature} >= 0, top_k {top_k} >= 1 and 0 < top_p {top_p} <= 1 must hold")
    cache = model.make_cache(tokens_bt.shape[1] + max_new_tokens) if use_cache else None
    ended_b1 = torch.zeros_like(tokens_bt[:, :1], dtype=torch.bool)
    new_bt = tokens_bt
    for _ in range(max_new_tokens):
        logits_bv = model(new_bt if use_cache else tokens_bt, cache=cache)[:, -1].float()
        new_bt = _choose(logits_bv, temperature, top_k, top_p, generator)
        if eos is not None:
            new_bt = new_bt.masked_fill(ended_b1, eos)
            ended_b1 = ended_b1 | (new_bt == eos)
        tokens_bt = torch.cat((tokens_bt, new_bt), dim=1)
        if eos is not None and bool(ended_b1.all()):
            break
    return tokens_bt


def _choose(
    logits_bv: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits_bv.argmax(dim=-1, keepdim=True)
    sorted_bv, index_bv = (logits_bv / temperature).sort(dim=-1, descending=True)
    if top_k is not None:
        sorted_bv[:, top_k:] = -torch.inf
    probabilities_bv = sorted_bv.softmax(dim=-1)
    if top_p is not None:
        before_bv = probabilities_bv.cumsum(dim=-1) - probabilities_bv
        probabilities_bv = probabilities_bv.masked_fill(before_bv >= top_p, 0.0)
    return index_bv.gather(1, torch.multinomial(probabilities_bv, 1, generator=generator))
