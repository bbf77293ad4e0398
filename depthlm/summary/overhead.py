"""What every mechanism adds to vanilla, and what it would send in a pipeline, counted as in the papers.

`python -m depthlm summary --overhead`: vanilla has the same size and backbone. The decoders are on the device `meta`,
so nothing is allocated.

`python -m depthlm summary --pipeline P=8 V=4`: in an interleaved schedule, P stages hold V chunks of consecutive layers
each: chunk j of C = P V is on stage j mod P, and C - 1 transitions lead from one chunk to the next. Naively, each
transition sends everything that the later layers need. With cross-stage caching (Attention Residuals, arXiv 2603.15031,
section 4.1), a stage keeps what it received for its earlier chunks, so only the rest is sent. The backward pass sends
as much.

With N_p blocks per chunk, Attention Residuals send N_p D C (C - 1) / 2 values per token naively, at most N_p D (C - 1)
at a time, and N_p D (P (P - 1) / 2 + (V - 1) P^2) with caching, at most N_p D P, if blocks end where chunks end. The
paper does not count the embedding, which is counted here. As in the paper, a stage does not keep what it computed.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

from depthlm.accounting.cost import BYTES_PER_VALUE, cache_bytes_per_token, count_parameters, linear_flops
from depthlm.build import build_model
from depthlm.config import Config, ConfigError, compose, mechanisms
from depthlm.console import stderr_console, stdout_console
from depthlm.counts import format_count
from depthlm.errors import UserError
from depthlm.mechanisms.residual import Residual
from depthlm.model import Decoder
from depthlm.model.attention.self_attention import SelfAttention

PREFILL_TOKENS = 128 * 1024
# tokens per forward pass of a prefill in chunks
PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class Overhead:
    """The columns of Table 2 of Depth-Attention (arXiv 2606.05014, appendix B), and more.

    flops_per_token: of one forward pass. io_bytes_per_token: activations read and written, in 16 bits. two_phase_io:
    all activations that the depth mechanism reads and writes in inference, in hidden states per token and sublayer, of
    which a residual connection has 3 (Attention Residuals, arXiv 2603.15031, Table 1). prefill_bytes: memory in
    addition to the KV cache while 128K tokens are prefilled at once, in 16 bits. prefill_chunk_bytes: the same in
    chunks, of which only one is in memory. As in Depth-Attention, the read before the final norm does not count.
    cache_bytes_per_token: of the KV cache in 16 bits, less where layers share it.
    """

    parameters: int
    flops_per_token: int
    io_bytes_per_token: int
    two_phase_io: float
    prefill_bytes: int
    prefill_chunk_bytes: int
    cache_bytes_per_token: int


def print_overhead(
    overrides: Sequence[str], config_dir: str | Path | None, as_json: bool, two_phase: bool = False
) -> None:
    """Print the overhead of every mechanism of conf/model (Depth-Attention, Table 2), as a table or as JSON.

    overrides: see `decoders`. two_phase: print `two_phase_io` in place of the bytes, and also of vanilla.
    """
    costs, size = {}, ""
    for config, model in decoders(overrides, config_dir):
        if (name := config.model.name) != "vanilla" or two_phase:
            costs[name], size = asdict(overhead(model, config.training.sequence_length)), model.size.name
    if as_json:
        print(json.dumps(costs, indent=1))
        return
    rows = {name: overhead_texts(cost, two_phase) for name, cost in costs.items()}
    print_table(f"Overhead over vanilla, size {size}\n", rows)


def decoders(overrides: Sequence[str], config_dir: str | Path | None) -> Iterator[tuple[Config, Decoder]]:
    """Yield the configuration of every mechanism of conf/model, and its decoder on the device `meta`.

    overrides: of any key outside `model`, or of model.loops. Raises ConfigError for an override of the mechanism.
    """
    refused = [
        override
        for override in overrides
        if override.lstrip("+~").startswith(("model=", "model.", "model/")) and not override.startswith("model.loops=")
    ]
    if refused:
        raise ConfigError([f"{override}: every mechanism is covered; leave it out" for override in refused])
    for name in track(mechanisms(config_dir), "mechanisms", console=stderr_console(), transient=True):
        config = compose([*overrides, f"model={name}"], config_dir, here=False)
        yield config, build_model(config, "meta")


def overhead(model: Decoder, sequence_length: int) -> Overhead:
    """Return the overhead of a decoder; works on the meta device."""
    with torch.device("meta"):
        vanilla = Decoder(model.size, model.backbone, Residual, SelfAttention, model.loops)
    attentions = [layer.attention for layer in model.layers]
    reads = list(model.connections)[:-1]
    flops = values = two_phase = 0.0
    for attention, vanilla_layer in zip(attentions, vanilla.layers, strict=True):
        of_both = [
            linear_flops(each) + each.forward_flops(sequence_length, True)
            for each in (attention, vanilla_layer.attention)
        ]
        flops += model.loops * (of_both[0] - of_both[1])
        of_attention = model.loops * attention.io_values()
        values, two_phase = values + of_attention, two_phase + of_attention
    for connection in reads:
        flops += linear_flops(connection) + connection.cost.flops
        values += connection.cost.io_values
        # alone, a read has the three values of the residual merge and its own
        alone = 3.0 * model.size.hidden_size + connection.cost.io_values
        two_phase += alone if connection.cost.two_phase_values is None else connection.cost.two_phase_values
    retained = retained_states(model) * model.size.hidden_size + model.loops * sum(a.held_values() for a in attentions)
    retained_bytes = BYTES_PER_VALUE * retained
    return Overhead(
        parameters=count_parameters(model)["total"] - count_parameters(vanilla)["total"],
        flops_per_token=round(flops),
        io_bytes_per_token=round(BYTES_PER_VALUE * values),
        two_phase_io=two_phase / (model.size.hidden_size * len(reads)),
        prefill_bytes=round(PREFILL_TOKENS * retained_bytes),
        prefill_chunk_bytes=round(PREFILL_CHUNK * retained_bytes),
        cache_bytes_per_token=cache_bytes_per_token(model) - cache_bytes_per_token(vanilla),
    )


@torch.no_grad()
def retained_states(model: Decoder) -> float:
    """Return the size of the largest state before a sublayer, in hidden states, minus that of a residual decoder.

    It is measured by passing one token through the connections (`Connection.retained`).
    """
    hidden_btd = torch.empty(1, 1, model.size.hidden_size, device=next(model.parameters()).device)
    connections = list(model.connections)[:-1]
    state, largest = connections[0].open(hidden_btd), 0.0
    for connection in connections:
        largest = max(largest, sum(x.numel() for x in connection.retained(state)) / hidden_btd.numel())
        _, carry = connection.read(state)
        # a new tensor, like the output of every sublayer
        state = connection.write(state, torch.empty_like(hidden_btd), carry)
    return largest - 1


def overhead_texts(cost: dict[str, float], two_phase: bool = False) -> dict[str, str]:
    """Return the columns of an overhead as text. two_phase: as in `print_overhead`."""
    io = {"I/O/token": size_text(cost["io_bytes_per_token"])}
    if two_phase:
        io = {"I/O/sublayer": f"{cost['two_phase_io']:.1f} D"}
    return {
        "parameters": f"{cost['parameters']:,}",
        "FLOPs/token": f"{cost['flops_per_token']:.2e}",
        **io,
        "128K prefill": f"{cost['prefill_bytes'] / 2**30:.1f} GiB",
        f"in chunks of {PREFILL_CHUNK:,}": f"{cost['prefill_chunk_bytes'] / 2**20:,.0f} MiB",
        "KV cache/token": size_text(cost["cache_bytes_per_token"]) if cost["cache_bytes_per_token"] else "0",
    }


def print_table(title: str, rows: dict[str, dict[str, str]]) -> None:
    """Print a row of texts, which have the same columns, for each mechanism."""
    columns = right_columns(*next(iter(rows.values())), no_wrap=True)
    first = Column("mechanism", min_width=max(map(len, rows)))
    settings = {"title_justify": "left", "title_style": "bold"}
    table = Table(first, *columns, title=title, box=None, padding=(0, 2, 0, 0), **settings)  # type: ignore[arg-type]
    for name, texts in rows.items():
        table.add_row(name, *texts.values())
    stdout_console().print(table)


def right_columns(*names: str, no_wrap: bool = False) -> list[Column]:
    """Return columns that are aligned to the right."""
    return [Column(name, justify="right", no_wrap=no_wrap) for name in names]


def size_text(count: float) -> str:
    """Return bytes in KiB or MiB."""
    if count < 0:
        return f"-{size_text(-count)}"
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB"
    # round halves up, as the papers do
    return f"{math.floor(count / 2**20 * 100 + 0.5) / 100:.2f} MiB"


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
    (stages, chunks), sent = read_schedule(words), {}
    for config, model in decoders(overrides, config_dir):
        sent[config.model.name], size = transitions(model, stages, chunks), model.size.name
    if as_json:
        print(json.dumps({name: bytes_._asdict() for name, bytes_ in sent.items()}, indent=1))
        return
    title = (
        f"Bytes per token across the {stages * chunks - 1} transitions of a pipeline, forward\n"
        f"size {size}, {stages} stages with {format_count(chunks, 'chunk')} of layers each\n"
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


def read_schedule(words: Sequence[str]) -> tuple[int, int]:
    """Return the stages and the chunks per stage of the words P=8 and V=4, in any order. Raises UserError."""
    numbers = {match[1]: int(match[2]) for word in words if (match := re.fullmatch(r"([PV])=(\d+)", word))}
    if sorted(numbers) != ["P", "V"] or numbers["P"] < 2 or numbers["V"] < 1:
        raise UserError(
            f"--pipeline {' '.join(words)}: must be P=<stages> V=<chunks of layers per stage>, with at least 2 stages "
            "and 1 chunk; for example --pipeline P=8 V=4"
        )
    return numbers["P"], numbers["V"]


@torch.no_grad()
def transitions(model: Decoder, stages: int, chunks_per_stage: int) -> Sent:
    """Return the values that a decoder sends for one token, also on the device `meta`. Raises UserError: see above.

    If the number of chunks does not divide that of the layers, some chunks have one layer more than others.
    """
    depth, chunks = model.loops * model.size.num_layers, stages * chunks_per_stage
    if depth < chunks:
        raise UserError(
            f"--pipeline P={stages} V={chunks_per_stage}: {chunks} chunks need as many layers, and size "
            f"{model.size.name} has {depth}; allowed: P times V up to {depth}"
        )
    token_bt = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    prefix, naive, cached = None, [], []
    # keeps all tensors, so that their ids differ
    needed: list[list[Tensor]] = []
    kept: list[set[int]] = [set() for _ in range(stages)]
    for chunk in range(chunks):
        prefix, _ = model.run(token_bt, prefix, until=chunk * depth // chunks)
        needed.append(model.tensors_to_send(prefix))
        sizes = {id(x): BYTES_PER_VALUE * x.numel() for x in needed[-1]}
        held = kept[chunk % stages]
        # the first chunk computes what it needs
        if chunk:
            naive.append(sum(sizes.values()))
            cached.append(sum(size for tensor, size in sizes.items() if tensor not in held))
        held.update(sizes)
    return Sent(naive, cached)
