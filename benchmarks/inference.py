"""The overhead of each mechanism in inference: every preset against vanilla.

Measured are prefill, decoding, the cache, and peak memory on a GPU.

    python benchmarks/inference.py [key=value ...] [--presets mhc dca] [--prompt 128] [--new 64] [--chunk 32]
    python benchmarks/inference.py --table depth_attention_3b        # a paper's rows, shape and numbers

Greedy decoding in eager mode with initial weights, in turns with vanilla, as in mechanisms.py. The shape is size=tiny
in fp32 (bf16 on a GPU); overrides change it. With --chunk, a prefill takes as many tokens per forward pass. `together`
is the overhead of prefill and decoding over the baseline: vanilla, or the one of the table. Vanilla also takes turns
with transformers' own `generate` on the same weights, if it has such a model, and the output says whether both generate
the same tokens.
"""

import statistics
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

import depthlm
from benchmarks import mechanisms as presets
from benchmarks.shared import interleaved, reporting
from benchmarks.shared.decoders import transformers_decoder
from depthlm.config import compose, mechanisms
from depthlm.machine import environment
from depthlm.model import Decoder
from depthlm.model.generation import generate, prefill
from depthlm.pretrained.folder import native_type

TABLES = reporting.TABLES / "inference"
CUDA = torch.cuda.is_available()


class Task(NamedTuple):
    """What every preset does: `new` tokens after `prompt` tokens of `batch` sequences.

    chunk: tokens of the prompt per forward pass; None: all at once.
    """

    overrides: list[str]
    batch: int
    prompt: int
    new: int
    chunk: int | None = None


def build(name: str, task: Task) -> tuple[Decoder, Tensor]:
    """Return a preset with its initial weights, and a prompt. name: the preset, optionally followed by overrides."""
    preset, *settings = name.split()
    config = compose([*task.overrides, f"model={preset}", *settings], here=False)
    model = depthlm.build_model(config, environment.device_type()).eval()
    generator = torch.Generator().manual_seed(0)
    tokens_bt = torch.randint(model.size.vocab_size, (task.batch, task.prompt), generator=generator)
    return model.to(torch.bfloat16) if CUDA else model, tokens_bt.to(environment.device_type())


@torch.inference_mode()
def filled_cache(model: Decoder, tokens_bt: Tensor, task: Task) -> Any:
    """Return the cache after the prompt, with space for the new tokens."""
    cache = model.make_cache(task.prompt + task.new)
    prefill(model, tokens_bt, cache, task.chunk)
    return cache


@torch.inference_mode()
def decode(model: Decoder, cache: Any, token_b1: Tensor, start: int, new: int) -> None:
    """Decode `new` greedy tokens one at a time, after `start` tokens in the cache."""
    cache.length = start
    for _ in range(new):
        token_b1 = model(token_b1, cache=cache)[:, -1].argmax(-1, keepdim=True)


def against_transformers(task: Task, rounds: int) -> dict[str, Any] | None:
    """Measure how many times as fast as transformers' generate vanilla generates the same tokens.

    None if transformers has no model with this backbone.
    """
    model, tokens_bt = build("vanilla", task)
    if native_type(model) is None:
        return None
    theirs: Any = transformers_decoder(model).eval()
    new = task.new
    settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def their_turn() -> Tensor:
        return theirs.generate(tokens_bt, attention_mask=torch.ones_like(tokens_bt), **settings)

    def our_turn() -> Tensor:
        return generate(model, tokens_bt, new, prefill_chunk=task.chunk)

    same = torch.equal(our_turn(), their_turn())
    seconds = interleaved.measure(
        {"depthlm": our_turn, "transformers": their_turn, "depthlm again": our_turn}, rounds, steps=1
    )
    return {
        "same_tokens": same,
        "ratio": interleaved.ratio(seconds, "depthlm", "transformers"),
        "again": interleaved.ratio(seconds, "depthlm", "depthlm again"),
        "tokens_per_second": task.batch * new / min(seconds["depthlm"]),
        "seconds": seconds,
    }


COLUMNS = ("preset", "prefill us/token", "added", "decode us/token", "added", "us added", "GiB", "cache bytes",
           "together", "paper")  # fmt: skip


def markdown(results: reporting.Results) -> str:
    # earlier results have no baseline, and neither has a baseline that failed
    baseline = results["presets"].get(results.get("baseline", "vanilla"), {})

    def over_baseline(line: presets.Line, name: str) -> str:
        both = line.get(name), baseline.get(name)
        return f"{both[0] / both[1] - 1:+.2%}" if both[0] and both[1] else ""

    def cells(line: presets.Line) -> list[str]:
        return [
            f"{line['prefill']['microseconds_per_token']:,.1f}",
            f"{line['prefill']['overhead']:+.1%}",
            f"{line['decode']['microseconds_per_token']:,.0f}",
            f"{line['decode']['overhead']:+.1%}",
            f"{line['decode']['microseconds_added']:+,.0f}",
            reporting.number(line["peak_memory_gib"], ".2f"),
            f"{line['cache_bytes']:,}",
            over_baseline(line, "together"),
            over_baseline(line, "paper_seconds"),
        ]

    return presets.preset_table(results, COLUMNS, cells)


def main() -> int:
    parser = presets.preset_parser(__doc__, TABLES)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens after the prompt")
    parser.add_argument("--chunk", type=int, metavar="N", help="tokens of the prompt per forward pass (default: all)")
    args = reporting.arguments_of(parser, markdown)
    if args.chunk is not None and args.chunk < 1:
        parser.error(f"--chunk {args.chunk}: must be at least 1")
    paper: Any = {} if args.table is None else reporting.read_table(TABLES, args.table)
    lengths = [paper.get(name, default) for name, default in (("prompt", args.prompt), ("new", args.new))]
    overrides = [*paper.get("overrides", ["size=tiny"]), *args.overrides]
    task = Task(overrides, paper.get("batch_size", 1), *lengths, args.chunk)
    published = paper.get("seconds", {})
    cache_bytes: dict[str, int] = {}

    def phases(name: str) -> dict[str, interleaved.Step]:
        model, tokens_bt = build(name, task)
        # the weights were in fp32 at first
        interleaved.gpu_bytes()
        cache = filled_cache(model, tokens_bt, task)
        cache_bytes[name] = cache.bytes()
        return {
            "prefill": lambda: filled_cache(model, tokens_bt, task),
            "decode": lambda: decode(model, cache, tokens_bt[:, :1], task.prompt, task.new),
        }

    def line_of(name: str, seconds: presets.Seconds) -> presets.Line:
        tokens = {"prefill": task.batch * task.prompt, "decode": task.batch * task.new}
        measured = {phase: presets.against(*both, tokens[phase]) for phase, both in seconds.items()}
        # of each round, relative to vanilla in the same round
        totals = [[sum(turns) for turns in zip(*phases, strict=True)] for phases in zip(*seconds.values(), strict=True)]
        together = statistics.median(own / vanilla for own, vanilla in zip(*totals, strict=True))
        own_line = {"cache_bytes": cache_bytes[name], "together": together, "paper_seconds": published.get(name)}
        return own_line | measured

    shape = [*task.overrides, f"batch={task.batch}", f"prompt={task.prompt}", f"new={task.new}"]
    shape += [] if task.chunk is None else [f"chunk={task.chunk}"]
    baseline = paper.get("baseline", "vanilla")
    results: reporting.Results = {"shape": shape, "table": args.table, "baseline": baseline}
    output = args.output or reporting.result_path(f"inference-{args.table}" if args.table else "inference")
    names = args.presets or [name for name in published or mechanisms() if name != "vanilla"]
    status = presets.measure_presets(names, phases, line_of, args.rounds, results, output)
    print(f"sizes of the caches in bytes: {sorted(set(cache_bytes.values()))}")
    try:
        peer = against_transformers(task, args.rounds) or {}
    except Exception as error:
        # the peer is another package, and its failure does not affect the lines above
        peer = {"error": reporting.error_text(error)}
        print(f"error: transformers' generate: {peer['error']}", file=sys.stderr)
    if "ratio" in peer:
        comparison = "the same" if peer["same_tokens"] else "OTHER"
        print(f"transformers' generate takes {peer['ratio']:.2f} times as long, and generates {comparison} tokens")
    reporting.publish(output, results | {"transformers": peer}, markdown)
    return int(status or "error" in peer)


if __name__ == "__main__":
    sys.exit(main())
