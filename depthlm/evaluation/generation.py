"""The command `python -m depthlm generate`: text that continues prompts.

Shapes: b batch, t tokens.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from depthlm.build import load
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.fields import key
from depthlm.machine.environment import Device, usable_device
from depthlm.model import Decoder
from depthlm.model.experts import Experts
from depthlm.model.generation import stream
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
        None, "sample only from the fewest tokens with this total probability", above=0, maximum=1
    )
    seed: int = key(1, "seed of the sampling", minimum=0, maximum=2**63 - 1)
    batch_size: int = key(16, "prompts of a file per batch", minimum=1)
    prefill_chunk: int | None = key(None, "tokens of the prompts per forward pass; null: all at once", minimum=1)
    precision: Literal["fp32", "bf16"] = key("fp32", "dtype of the computation")
    device: Device = key("auto", "auto: the GPU if there is one, else the CPU")
    trust: list[str] | None = key(None, "modules that may define the run's own mechanism")


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
    prompt_ids = tokenizer.encode_batch(prompts)
    # a document follows the end of another one
    encoded = [ids or [tokenizer.end_of_text] for ids in prompt_ids]
    context = config.training.sequence_length
    limits = [arguments.max_new_tokens or max(1, min(NEW_TOKENS, context - len(ids))) for ids in encoded]
    for number, ids, new_tokens in zip(lines, encoded, limits, strict=True):
        if len(ids) + new_tokens > context:
            which = "prompt=:" if arguments.prompts is None else f"prompts={arguments.prompts}, line {number}:"
            raise UserError(
                f"{which} {len(ids)} tokens and max_new_tokens={new_tokens} are more than the {context} tokens "
                f"of the run's context; allowed: max_new_tokens up to {max(0, context - len(ids))} for this prompt"
            )
    if arguments.precision == "bf16":
        for module in model.modules():
            if isinstance(module, Experts):
                # autocast does not store casts of experts, and would cast all of them for every token
                module.to(torch.bfloat16)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    with autocast:
        if arguments.prompts is None:
            steps = _continue(model, tokenizer, encoded, limits, arguments, generator)
            print_stream(prompts[0], (text_after(tokenizer, prompt_ids[0], row) for (row,) in steps))
            return
        for start in range(0, len(encoded), arguments.batch_size):
            part = slice(start, start + arguments.batch_size)
            *_, last = _continue(model, tokenizer, encoded[part], limits[part], arguments, generator)
            for prompt, ids, row in zip(prompts[part], prompt_ids[part], last, strict=True):
                continued = {"prompt": prompt, "text": text_after(tokenizer, ids, row)}
                print(json.dumps(continued, ensure_ascii=False), flush=True)


def _continue(
    model: Decoder,
    tokenizer: Tokenizer,
    encoded: Sequence[list[int]],
    limits: Sequence[int],
    arguments: Generate,
    generator: torch.Generator,
) -> Iterator[list[list[int]]]:
    """Yield, after every new token, the tokens that follow each prompt so far, without the end of text.

    limits: the most new tokens of each prompt.
    """
    width = max(map(len, encoded))
    device = generator.device
    tokens_bt = torch.tensor([[0] * (width - len(ids)) + ids for ids in encoded], device=device)
    padding = [width - len(ids) for ids in encoded]
    new = stream(
        model,
        tokens_bt,
        max(limits),
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        generator=generator,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.end_of_text,
        padding_b=torch.tensor(padding, device=device) if any(padding) else None,
        prefill_chunk=arguments.prefill_chunk,
    )
    rows: list[list[int]] = [[] for _ in encoded]
    for tokens_b1 in new:
        for row, token, limit in zip(rows, tokens_b1[:, 0].tolist(), limits, strict=True):
            if token != tokenizer.end_of_text and len(row) < limit:
                row.append(token)
        yield rows


def text_after(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """Return the text that new tokens add to those of a prompt.

    A tokenizer such as T5's drops the space at the beginning of what it decodes, so the new tokens are decoded together
    with the prompt.
    """
    start, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(new)


def print_stream(prompt: str, texts: Iterator[str]) -> None:
    """Print a prompt and what each of the growing texts that continue it adds, in complete characters."""
    # a model of somebody else may write control characters
    escaped = printable if sys.stdout.isatty() else str
    sys.stdout.write(escaped(prompt))
    shown = ""
    text = ""
    for text in texts:
        complete = text.rstrip(UNFINISHED)
        # a byte that ends no character changes what some tokenizers have decoded the bytes before it to
        if len(complete) > len(shown):
            sys.stdout.write(escaped(complete[len(shown) :]))
            shown = complete
        sys.stdout.flush()
    sys.stdout.write(escaped(text[len(shown) :]) + "\n")


def _lines(file: Path) -> dict[int, str]:
    """Return the lines with a prompt, by their number in the file."""
    try:
        all_lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={file}: cannot be read ({error})") from None
    lines = {number: line for number, line in enumerate(all_lines, start=1) if line.strip()}
    if not lines:
        raise UserError(f"prompts={file}: no prompt in it")
    return lines
