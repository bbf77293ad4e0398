"""`python -m depthlm generate`: what a run writes after a prompt, as it comes, or after many at once."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.evaluation.generation import stream
from depthlm.fields import key
from depthlm.loading import load
from depthlm.machine.environment import DEVICES, usable_device
from depthlm.model import Decoder

# of bytes that are no character yet
UNFINISHED = "\ufffd"
# after a prompt, where the command does not say
NEW_TOKENS = 128


@dataclass
class Generate:
    """What `generate` takes."""

    run: str = key(doc="run directory; its newest whole checkpoint writes")
    prompt: Optional[str] = key(None, "what to go on from; empty: a document's beginning")
    prompts: Optional[str] = key(None, "a file with a prompt a line instead; prints a JSON object a line")
    max_new_tokens: Optional[int] = key(
        None,
        f"tokens after the prompt, fewer where the text ends; null: {NEW_TOKENS}, or what the context has room for",
        minimum=1,
    )
    temperature: float = key(0.8, "0: always the most likely token; below 1: nearer to it", minimum=0)
    top_k: Optional[int] = key(50, "sample only from the k most likely tokens", minimum=1)
    top_p: Optional[float] = key(
        None, "sample only from the fewest tokens that reach this probability", above=0, maximum=1
    )
    seed: int = key(1, "of the sampling", minimum=0)
    batch_size: int = key(16, "prompts of a file at a time", minimum=1)
    precision: str = key("fp32", "number format of the computation", choices=("fp32", "bf16"))
    device: str = key("auto", "auto: the GPU, or the CPU where there is none", choices=DEVICES)
    trust: Optional[list[str]] = key(None, "modules that the run's own mechanism may come from")


def write_text(arguments: Generate) -> None:
    """Print what follows the prompt, or a line of JSON for each prompt of a file: {"prompt", "text"}.

    Raises UserError for a run without a checkpoint, no prompt or two kinds, a file that cannot be read, or a prompt
    that leaves no room in the context the run was trained on.
    """
    if (arguments.prompt is None) == (arguments.prompts is None):
        raise UserError("give prompt=<text> or prompts=<file>")
    lines = {1: arguments.prompt or ""} if arguments.prompts is None else _lines(Path(arguments.prompts))
    prompts = list(lines.values())
    device = torch.device(usable_device(arguments.device))
    model, config = load(arguments.run, device, arguments.trust or ())
    tokenizer = Tokenizer.load(arguments.run)
    # before a document there is the end of another
    encoded = [ids or [tokenizer.end_of_text] for ids in tokenizer.encode_batch(prompts)]
    context = config.training.sequence_length
    room = context - max(map(len, encoded))
    wanted = arguments.max_new_tokens or max(1, min(NEW_TOKENS, room))
    for number, ids in zip(lines, encoded, strict=True):
        if len(ids) + wanted > context:
            which = "prompt=" if arguments.prompts is None else f"prompts={arguments.prompts}, line {number}:"
            raise UserError(
                f"{which} {len(ids)} tokens and max_new_tokens={wanted} are more than the {context} "
                f"of the run's context; allowed: max_new_tokens up to {max(0, context - len(ids))} here"
            )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    with autocast:
        if arguments.prompts is None:
            steps = _continue(model, tokenizer, encoded, wanted, arguments, generator)
            _print_as_it_comes(prompts[0], (tokenizer.decode(row) for (row,) in steps))
            return
        for start in range(0, len(encoded), arguments.batch_size):
            part = slice(start, start + arguments.batch_size)
            *_, last = _continue(model, tokenizer, encoded[part], wanted, arguments, generator)
            for prompt, row in zip(prompts[part], last, strict=True):
                told = {"prompt": prompt, "text": tokenizer.decode(row)}
                print(json.dumps(told, ensure_ascii=False), flush=True)


def _continue(
    model: Decoder,
    tokenizer: Tokenizer,
    encoded: Sequence[list[int]],
    max_new_tokens: int,
    arguments: Generate,
    generator: torch.Generator,
) -> Iterator[list[list[int]]]:
    """The tokens that follow each prompt so far, without the end of the text, after every token."""
    width = max(map(len, encoded))
    device = generator.device
    tokens_bt = torch.tensor([[0] * (width - len(ids)) + ids for ids in encoded], device=device)
    padding_b: Tensor | None = torch.tensor([width - len(ids) for ids in encoded], device=device)
    if len({len(ids) for ids in encoded}) == 1:
        padding_b = None
    new = stream(
        model, tokens_bt, max_new_tokens, arguments.temperature, arguments.top_k, arguments.top_p, generator,
        eos=tokenizer.end_of_text, padding_b=padding_b,
    )  # fmt: skip
    rows: list[list[int]] = [[] for _ in encoded]
    for tokens_b1 in new:
        for row, token in zip(rows, tokens_b1[:, 0].tolist(), strict=True):
            if token != tokenizer.end_of_text:
                row.append(token)
        yield rows


def _print_as_it_comes(prompt: str, texts: Iterator[str]) -> None:
    sys.stdout.write(prompt)
    shown = ""
    text = ""
    for text in texts:
        whole = text.rstrip(UNFINISHED)
        if whole.startswith(shown):
            sys.stdout.write(whole[len(shown) :])
            shown = whole
        sys.stdout.flush()
    sys.stdout.write(text[len(shown) :] + "\n")


def _lines(file: Path) -> dict[int, str]:
    """The lines with a prompt, by their number in the file."""
    try:
        whole = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={file}: cannot be read ({error})") from None
    lines = {number: line for number, line in enumerate(whole, start=1) if line.strip()}
    if not lines:
        raise UserError(f"prompts={file}: no prompt in it")
    return lines
