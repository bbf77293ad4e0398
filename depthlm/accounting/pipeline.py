"""What every mechanism sends in a pipeline, counted without one: `python -m depthlm summary --pipeline P=8 V=4`.

In an interleaved schedule, P stages hold V chunks of consecutive layers each: chunk j of C = P V is on stage j mod P,
and C - 1 transitions lead from one chunk to the next. Naively, each transition sends everything that the later layers
need. With cross-stage caching (Attention Residuals, arXiv 2603.15031, section 4.1), a stage keeps what it received for
its earlier chunks, so only the rest is sent. The backward pass sends as much.

With N_p blocks per chunk, Attention Residuals send N_p D C (C - 1) / 2 values per token naively, at most N_p D (C - 1)
at a time, and N_p D (P (P - 1) / 2 + (V - 1) P^2) with caching, at most N_p D P, if blocks end where chunks end. The
paper does not count the embedding, which is counted here. As in the paper, a stage does not keep what it computed.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from depthlm.accounting.cost import BYTES_PER_VALUE
from depthlm.accounting.overhead import decoders, print_table, size_text
from depthlm.counts import format_count
from depthlm.errors import UserError
from depthlm.model import Decoder


class Schedule(NamedTuple):
    """An interleaved schedule: P stages, each with V chunks of layers."""

    stages: int
    virtual: int

    @property
    def chunks(self) -> int:
        return self.stages * self.virtual


class Sent(NamedTuple):
    """The bytes per token across each of the C - 1 transitions, in 16 bits."""

    naive: list[int]
    cached: list[int]


def print_pipeline(
    words: Sequence[str], overrides: Sequence[str], config_dir: str | Path | None, as_json: bool
) -> None:
    """Print the bytes across the transitions of a pipeline for every mechanism, as a table or as JSON.

    words: P=<stages> and V=<chunks per stage>. overrides: see `decoders`. Raises UserError for other words, and if
    there are fewer layers than chunks.
    """
    schedule, sent = read_schedule(words), {}
    for name, model in decoders(overrides, config_dir):
        sent[name], size = transitions(model, schedule), model.size.name
    if as_json:
        print(json.dumps({name: bytes_._asdict() for name, bytes_ in sent.items()}, indent=1))
        return
    title = (
        f"Bytes per token across the {schedule.chunks - 1} transitions of a pipeline, forward\n"
        f"size {size}, {schedule.stages} stages with {format_count(schedule.virtual, 'chunk')} of layers each\n"
    )
    rows = {
        name: {
            "naive": size_text(sum(naive)),
            "largest": size_text(max(naive)),
            "cached": size_text(sum(cached)),
            "largest, cached": size_text(max(cached)),
        }
        for name, (naive, cached) in sent.items()
    }
    print_table(title, rows)


def read_schedule(words: Sequence[str]) -> Schedule:
    """Return the schedule of the words P=8 and V=4, in any order. Raises UserError."""
    numbers = {match[1]: int(match[2]) for word in words if (match := re.fullmatch(r"([PV])=(\d+)", word))}
    if sorted(numbers) != ["P", "V"] or numbers["P"] < 2 or numbers["V"] < 1:
        raise UserError(
            f"--pipeline {' '.join(words)}: must be P=<stages> V=<chunks of layers per stage>, with at least 2 stages "
            "and 1 chunk; for example --pipeline P=8 V=4"
        )
    return Schedule(numbers["P"], numbers["V"])


@torch.no_grad()
def transitions(model: Decoder, schedule: Schedule) -> Sent:
    """Return what a decoder sends; one token passes through it, also on the device `meta`. Raises UserError: see above.

    If the number of chunks does not divide that of the layers, some chunks have one layer more than others.
    """
    depth, chunks = model.loops * model.size.num_layers, schedule.chunks
    if depth < chunks:
        raise UserError(
            f"--pipeline P={schedule.stages} V={schedule.virtual}: {chunks} chunks need as many layers, and size "
            f"{model.size.name} has {depth}; allowed: P times V up to {depth}"
        )
    token_bt = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    prefix, naive, cached = None, [], []
    # keeps all tensors, so that their ids differ
    needed: list[list[Tensor]] = []
    kept: list[set[int]] = [set() for _ in range(schedule.stages)]
    for chunk in range(chunks):
        prefix, _ = model.run(token_bt, prefix, until=chunk * depth // chunks)
        needed.append(model.needed(prefix))
        sizes = {id(x): BYTES_PER_VALUE * x.numel() for x in needed[-1]}
        held = kept[chunk % schedule.stages]
        # the first chunk computes what it needs
        if chunk:
            naive.append(sum(sizes.values()))
            cached.append(sum(size for tensor, size in sizes.items() if tensor not in held))
        held.update(sizes)
    return Sent(naive, cached)
