"""The overhead of each mechanism in inference: prefill, decoding, peak memory and cache, every preset against vanilla.

    python benchmarks/inference.py [key=value ...] [--presets mhc dca] [--batch 1] [--prompt 128] [--new 64]
    python benchmarks/inference.py --table depth_attention_3b        # a paper's rows, shape and numbers

Greedy decoding in eager mode with initial weights. The shape is size=tiny in fp32 (bf16 on a GPU); overrides change it.
Presets take turns in groups, each with two vanilla decoders: a round is compared with their mean, and their ratio shows
the noise of the machine. Vanilla also takes turns with transformers' own `generate` on the same weights, and the output
says whether both generate the same tokens.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from interleaved import (
    Step,
    against,
    error_text,
    gpu_bytes,
    measure,
    peak_gib_above,
    peak_memory_gib,
    print_peak_memory,
    ratio,
    release,
    result_path,
    write_json,
)
from omegaconf import OmegaConf
from others.decoders import transformers_decoder
from rich.console import Console
from rich.table import Table
from torch import Tensor

import depthlm
from depthlm.config import compose_anywhere, mechanisms
from depthlm.evaluation import generate
from depthlm.machine import environment
from depthlm.model import Decoder

AGAIN = "vanilla again"
# presets that are in memory at once
GROUP = 7
TABLES = Path(__file__).parent / "tables" / "inference"
CUDA = torch.cuda.is_available()


def build(name: str, overrides: list[str]) -> Decoder:
    """Build a preset with its initial weights. name: the preset, optionally followed by its own overrides."""
    preset, *own = ("vanilla" if name == AGAIN else name).split()
    config = compose_anywhere([*overrides, f"model={preset}", *own])
    model = depthlm.build_model(config, environment.device_type()).eval()
    return model.to(torch.bfloat16) if CUDA else model


def prompt_of(model: Decoder, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.size.vocab_size, (batch, length), generator=generator).to(environment.device_type())


@torch.inference_mode()
def prefill(model: Decoder, tokens_bt: Tensor, new: int) -> Any:
    """Return the cache after the prompt, with space for `new` tokens."""
    cache = model.make_cache(tokens_bt.shape[1] + new)
    model.logits(model.hidden(tokens_bt, cache)[:, -1:])
    return cache


@torch.inference_mode()
def decode(model: Decoder, cache: Any, token_b1: Tensor, start: int, new: int) -> None:
    """Decode `new` greedy tokens one at a time, after `start` tokens in the cache."""
    cache.length = start
    for _ in range(new):
        token_b1 = model(token_b1, cache=cache)[:, -1].argmax(-1, keepdim=True)


def steps(model: Decoder, tokens_bt: Tensor, new: int) -> tuple[Step, Step, int]:
    """Return (prefill, decoding of `new` tokens, bytes of the cache after both)."""
    cache, start = prefill(model, tokens_bt, new), tokens_bt.shape[1]
    decode(model, cache, tokens_bt[:, :1], start, new)
    return (
        lambda: prefill(model, tokens_bt, new),
        lambda: decode(model, cache, tokens_bt[:, :1], start, new),
        cache.bytes(),
    )


def against_transformers(overrides: list[str], batch: int, length: int, new: int, rounds: int) -> dict[str, Any]:
    """Measure how many times as fast as transformers' generate vanilla generates the same tokens."""
    model = build("vanilla", overrides)
    theirs: Any = transformers_decoder(model).eval()
    tokens_bt = prompt_of(model, batch, length)
    settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def their_turn() -> Tensor:
        return theirs.generate(tokens_bt, attention_mask=torch.ones_like(tokens_bt), **settings)

    def our_turn() -> Tensor:
        return generate(model, tokens_bt, new)

    same = torch.equal(our_turn(), their_turn())
    seconds = measure({"depthlm": our_turn, "transformers": their_turn, "depthlm again": our_turn}, rounds, steps=1)
    return {
        "same_tokens": same,
        "ratio": ratio(seconds, "depthlm", "transformers"),
        "again": ratio(seconds, "depthlm", "depthlm again"),
        "tokens_per_second": batch * new / min(seconds["depthlm"]),
        "seconds": seconds,
    }


def rows(
    built: dict[str, tuple[Step, Step, int]], rounds: int, tokens: tuple[int, int]
) -> tuple[dict[str, Any], list[float]]:
    """Return one line per preset, and the ratios of vanilla to itself. tokens: of one prefill and of one decoding."""
    lines: dict[str, Any] = {name: {"cache_bytes": one[2]} for name, one in built.items() if name != AGAIN}
    again: list[float] = []
    for index, (kind, count) in enumerate(zip(("prefill", "decode"), tokens, strict=True)):
        seconds = measure({name: one[index] for name, one in built.items()}, rounds, steps=1, warmup=1, settle=1)
        again += [a / b for a, b in zip(seconds[AGAIN], seconds["vanilla"], strict=True)]
        vanilla = [statistics.mean(pair) for pair in zip(seconds["vanilla"], seconds[AGAIN], strict=True)]
        for name, line in lines.items():
            line[kind] = against(vanilla if name == "vanilla" else seconds[name], vanilla, count)
    return lines, again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py, for all contenders")
    parser.add_argument("--presets", nargs="+", help="mechanisms (default: those of the table, else all)")
    parser.add_argument("--table", choices=sorted(path.stem for path in TABLES.glob("*.yaml")), help="a paper's table")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens after the prompt")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=environment.cores(), help="CPU threads (default: all cores)")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--memory-of", metavar="PRESET", help=argparse.SUPPRESS)
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the results of an earlier run as Markdown")
    args = parser.parse_intermixed_args()
    if args.markdown:
        print(markdown(json.loads(args.markdown.read_text())))
        return 0
    paper: Any = {} if args.table is None else OmegaConf.to_container(OmegaConf.load(TABLES / f"{args.table}.yaml"))
    if paper:
        args.batch, args.prompt, args.new = paper["batch_size"], paper["prompt"], paper["new"]
    overrides = [*paper.get("overrides", ["size=tiny"]), *args.overrides]
    presets = args.presets or [name for name in paper.get("seconds", mechanisms()) if name != "vanilla"]
    torch.set_num_threads(args.threads)
    if args.memory_of:
        model = build(args.memory_of, overrides)
        tokens_bt = prompt_of(model, args.batch, args.prompt)
        print_peak_memory(lambda: prefill(model, tokens_bt, args.new))
        return 0
    memory: dict[str, float | None] = {}
    if not CUDA:
        memory_arguments = [
            "--batch",
            str(args.batch),
            "--prompt",
            str(args.prompt),
            "--new",
            str(args.new),
            *overrides,
        ]
        memory |= {name: peak_memory_gib(__file__, name, *memory_arguments) for name in ["vanilla", *presets]}
    results: dict[str, Any] = {
        "shape": [*overrides, f"batch={args.batch}", f"prompt={args.prompt}", f"new={args.new}"],
        "table": args.table,
        "again": [],
        "presets": {},
    }
    output = args.output or result_path(f"inference-{args.table}" if args.table else "inference")

    def measure_group(names: list[str]) -> None:
        built = {}
        for name in ["vanilla", *names, AGAIN]:
            used = gpu_bytes()
            model = build(name, overrides)
            # the weights were in fp32 at first
            gpu_bytes()
            built[name] = steps(model, prompt_of(model, args.batch, args.prompt), args.new)
            if CUDA:
                memory.setdefault(name, peak_gib_above(used))
        lines, again = rows(built, args.rounds, (args.batch * args.prompt, args.batch * args.new))
        results["again"] += again
        for name, line in lines.items():
            phases = {k: sum(line[k]["seconds"]) / args.rounds for k in ("prefill", "decode")}
            line |= {"peak_memory_gib": memory[name], "seconds": sum(phases.values())}
            line |= {"paper_seconds": paper.get("seconds", {}).get(name)}
            line |= {"paper_gb": paper.get("prefill_gb", {}).get(name)}
            # vanilla is in each group, and the line of the first group is kept
            results["presets"].setdefault(name, line)

    for start in range(0, len(presets), GROUP):
        measure_group(presets[start : start + GROUP])
        release()
        write_json(output, results)
    Console(highlight=False).print(table(results))
    same = {line["cache_bytes"] for line in results["presets"].values()}
    print(f"every cache has the size of vanilla's: {len(same) == 1} ({same} bytes)")
    try:
        peer = against_transformers(overrides, args.batch, args.prompt, args.new, args.rounds)
    except Exception as error:
        # the peer is another package, and its failure does not affect the lines above
        results["transformers"] = {"error": error_text(error)}
        print(f"error: transformers' generate: {results['transformers']['error']}", file=sys.stderr)
    else:
        results["transformers"] = peer
        comparison = "the same" if peer["same_tokens"] else "OTHER"
        print(f"transformers' generate takes {peer['ratio']:.2f} times as long, and generates {comparison} tokens")
    write_json(output, results)
    print(f"written to {output}")
    return int("error" in results["transformers"])


COLUMNS = ("preset", "prefill us/token", "added", "decode us/token", "added", "us added", "GiB", "cache bytes", "paper")


def cells(name: str, line: dict[str, Any], vanilla: dict[str, Any]) -> list[str]:
    """Return the line of one preset. paper: the overhead in prefill and decoding together."""
    paper = line["paper_seconds"] and line["paper_seconds"] / vanilla["paper_seconds"] - 1
    return [
        name,
        f"{line['prefill']['microseconds_per_token']:,.1f}",
        f"{line['prefill']['overhead']:+.1%}",
        f"{line['decode']['microseconds_per_token']:,.0f}",
        f"{line['decode']['overhead']:+.1%}",
        f"{line['decode']['microseconds_added']:+,.0f}",
        "" if line["peak_memory_gib"] is None else f"{line['peak_memory_gib']:.2f}",
        f"{line['cache_bytes']:,}",
        "" if paper is None else f"{paper:+.2%}",
    ]


def lines_of(results: dict[str, Any]) -> list[list[str]]:
    presets = results["presets"]
    return [cells(name, line, presets["vanilla"]) for name, line in presets.items()]


def table(results: dict[str, Any]) -> Table:
    spread = max(abs(value - 1) for value in results["again"])
    median = statistics.median(results["again"])
    shown = Table(*COLUMNS, caption=f"vanilla again: median {median:.3f}, single rounds differ by up to {spread:.1%}")
    for line in lines_of(results):
        shown.add_row(*line)
    return shown


def markdown(results: dict[str, Any]) -> str:
    machine = results["machine"]
    head = f"{machine['device']}, {machine['threads']} threads, torch {machine['versions']['torch']}:"
    lines = [head, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in lines_of(results))])


if __name__ == "__main__":
    sys.exit(main())
