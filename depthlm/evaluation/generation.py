"""Generate text with a decoder, one token at a time, and the command `python -m depthlm generate`.

Shapes: b batch, t tokens, v vocabulary.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from depthlm.build import load
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.fields import key
from depthlm.machine.environment import Device, usable_device
from depthlm.model import Decoder
from depthlm.model.attention.context import Cache
from depthlm.streams import printable

# what the tokenizer decodes an incomplete UTF-8 character to
UNFINISHED = "\ufffd"
# default for max_new_tokens
NEW_TOKENS = 128


@dataclass
class Generate:
    """The arguments of `generate`."""

    run: str = key(doc="run directory; its newest valid checkpoint is used")
    prompt: str | None = key(None, "the text to continue; empty: the beginning of a document")
    prompts: str | None = key(None, "a file with one prompt per line, instead; prints one JSON object per line")
    max_new_tokens: int | None = key(
        None,
        f"tokens after the prompt, fewer if the text ends; null: {NEW_TOKENS}, or as many as fit into the context",
        minimum=1,
    )
    temperature: float = key(0.8, "0: always the most likely token; lower values favor likely tokens", minimum=0)
    top_k: int | None = key(50, "sample only from the k most likely tokens", minimum=1)
    top_p: float | None = key(
        None, "sample only from the fewest tokens whose total probability reaches this", above=0, maximum=1
    )
    seed: int = key(1, "seed of the sampling", minimum=0)
    batch_size: int = key(16, "prompts of a file per batch", minimum=1)
    prefill_chunk: int | None = key(
        None, "tokens of the prompts per forward pass, which limits memory; null: all at once", minimum=1
    )
    precision: Literal["fp32", "bf16"] = key("fp32", "dtype of the computation")
    device: Device = key("auto", "auto: the GPU if there is one, else the CPU")
    trust: list[str] | None = key(None, "modules that may define the run's own mechanism")


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
        hidden_btd = model.hidden(tokens_bt[:, part], cache, ends_bt=None if ends_bt is None else ends_bt[:, part])
    return model.logits(hidden_btd[:, -1:])[:, 0]


def write_text(arguments: Generate) -> None:
    """Print the prompt and its continuation, or one line of JSON for each prompt of a file: {"prompt", "text"}.

    Raises UserError for a run without a checkpoint, if not exactly one of prompt and prompts is set, for a file that
    cannot be read, and for a prompt that does not fit into the run's context together with the new tokens.
    """
    if (arguments.prompt is None) == (arguments.prompts is None):
        raise UserError("give prompt=<text> or prompts=<file>")
    lines = {1: arguments.prompt or ""} if arguments.prompts is None else _lines(Path(arguments.prompts))
    prompts = list(lines.values())
    device = torch.device(usable_device(arguments.device))
    model, config = load(arguments.run, device, arguments.trust or ())
    tokenizer = Tokenizer.load(arguments.run)
    # a document follows the end of another one
    encoded = [ids or [tokenizer.end_of_text] for ids in tokenizer.encode_batch(prompts)]
    context = config.training.sequence_length
    available = context - max(map(len, encoded))
    new_tokens = arguments.max_new_tokens or max(1, min(NEW_TOKENS, available))
    for number, ids in zip(lines, encoded, strict=True):
        if len(ids) + new_tokens > context:
            which = "prompt=:" if arguments.prompts is None else f"prompts={arguments.prompts}, line {number}:"
            raise UserError(
                f"{which} {len(ids)} tokens and max_new_tokens={new_tokens} are more than the {context} tokens "
                f"of the run's context; allowed: max_new_tokens up to {max(0, context - len(ids))} for this prompt"
            )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    with autocast:
        if arguments.prompts is None:
            steps = _continue(model, tokenizer, encoded, new_tokens, arguments, generator)
            _print_stream(prompts[0], (tokenizer.decode(row) for (row,) in steps))
            return
        for start in range(0, len(encoded), arguments.batch_size):
            part = slice(start, start + arguments.batch_size)
            *_, last = _continue(model, tokenizer, encoded[part], new_tokens, arguments, generator)
            for prompt, row in zip(prompts[part], last, strict=True):
                continued = {"prompt": prompt, "text": tokenizer.decode(row)}
                print(json.dumps(continued, ensure_ascii=False), flush=True)


def _choose(logits_bv: Tensor, settings: Sampling) -> Tensor:
    temperature, top_k, top_p, generator, vocab_size = settings
    logits_bv = logits_bv[:, :vocab_size]
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


def _continue(
    model: Decoder,
    tokenizer: Tokenizer,
    encoded: Sequence[list[int]],
    max_new_tokens: int,
    arguments: Generate,
    generator: torch.Generator,
) -> Iterator[list[list[int]]]:
    """Yield, after every new token, the tokens that follow each prompt so far, without the end of text."""
    width = max(map(len, encoded))
    device = generator.device
    tokens_bt = torch.tensor([[0] * (width - len(ids)) + ids for ids in encoded], device=device)
    padding_b: Tensor | None = torch.tensor([width - len(ids) for ids in encoded], device=device)
    if len({len(ids) for ids in encoded}) == 1:
        padding_b = None
    new = stream(
        model,
        tokens_bt,
        max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        generator=generator,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.end_of_text,
        padding_b=padding_b,
        prefill_chunk=arguments.prefill_chunk,
    )
    rows: list[list[int]] = [[] for _ in encoded]
    for tokens_b1 in new:
        for row, token in zip(rows, tokens_b1[:, 0].tolist(), strict=True):
            if token != tokenizer.end_of_text:
                row.append(token)
        yield rows


def _print_stream(prompt: str, texts: Iterator[str]) -> None:
    # a model of somebody else may write control characters
    escaped = printable if sys.stdout.isatty() else str
    sys.stdout.write(escaped(prompt))
    shown = ""
    text = ""
    for text in texts:
        complete = text.rstrip(UNFINISHED)
        if complete.startswith(shown):
            sys.stdout.write(escaped(complete[len(shown) :]))
            shown = complete
        sys.stdout.flush()
    sys.stdout.write(escaped(text[len(shown) :]) + "\n")


def _lines(file: Path) -> dict[int, str]:
    """Return the lines with a prompt, by their number in the file."""
    try:
        all_lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={file}: cannot be read ({error})") from None
    lines = {number: line for number, line in enumerate(all_lines, start=1) if line.strip()}
    if not lines:
        raise UserError(f"prompts={file}: no prompt in it")
    return lines
