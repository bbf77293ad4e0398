"""The overhead of each mechanism in inference: prefill, decoding, peak memory and cache, every preset against vanilla.

    python benchmarks/inference.py [key=value ...] [--presets mhc dca] [--batch 1] [--prompt 128] [--new 64]
    python benchmarks/inference.py --table depth_attention_3b        # a paper's rows, shape and numbers

Greedy decoding in eager mode with initial weights. The shape is size=tiny in fp32 (bf16 on a GPU); overrides change it.
Presets take turns in groups, each with two vanilla decoders: a round is compared with their mean, and their ratio shows
the noise of the machine. Vanilla also takes turns with transformers' own `generate` on the same weights, and the output
says whether both generate the same tokens.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor

import depthlm
from benchmarks.shared import interleaved, reporting
from benchmarks.shared.decoders import transformers_decoder
from depthlm.config import compose_anywhere, mechanisms
from depthlm.evaluation import generate
from depthlm.machine import environment
from depthlm.model import Decoder

AGAIN = "vanilla again"
# presets that are in memory at once
GROUP = 7
TABLES = Path(__file__).parent / "tables" / "inference"
CUDA = torch.cuda.is_available()


class Task(NamedTuple):
    """What every preset does: `new` tokens after `prompt` tokens of `batch` sequences."""

    overrides: list[str]
    batch: int
    prompt: int
    new: int


class Phases(NamedTuple):
    """prefill, and the decoding of all new tokens; the bytes of the cache after both."""

    prefill: interleaved.Step
    decode: interleaved.Step
    cache_bytes: int


def build(name: str, overrides: list[str]) -> Decoder:
    """Build a preset with its initial weights. name: the preset, optionally followed by overrides of it."""
    preset, *settings = ("vanilla" if name == AGAIN else name).split()
    config = compose_anywhere([*overrides, f"model={preset}", *settings])
    model = depthlm.build_model(config, environment.device_type()).eval()
    return model.to(torch.bfloat16) if CUDA else model


def prompt_of(model: Decoder, task: Task) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens_bt = torch.randint(model.size.vocab_size, (task.batch, task.prompt), generator=generator)
    return tokens_bt.to(environment.device_type())


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


def phases_of(model: Decoder, task: Task) -> Phases:
    tokens_bt = prompt_of(model, task)
    cache = prefill(model, tokens_bt, task.new)

    def decoding() -> None:
        decode(model, cache, tokens_bt[:, :1], task.prompt, task.new)

    decoding()
    return Phases(lambda: prefill(model, tokens_bt, task.new), decoding, cache.bytes())


def prefill_of(name: str, task: Task) -> interleaved.Step:
    """Return the prefill of a preset, for a new process."""
    model = build(name, task.overrides)
    tokens_bt = prompt_of(model, task)
    return lambda: prefill(model, tokens_bt, task.new)


def against_transformers(task: Task, rounds: int) -> dict[str, Any]:
    """Measure how many times as fast as transformers' generate vanilla generates the same tokens."""
    model = build("vanilla", task.overrides)
    theirs: Any = transformers_decoder(model).eval()
    tokens_bt, new = prompt_of(model, task), task.new
    settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def their_turn() -> Tensor:
        return theirs.generate(tokens_bt, attention_mask=torch.ones_like(tokens_bt), **settings)

    def our_turn() -> Tensor:
        return generate(model, tokens_bt, new)

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


def measure_group(
    names: list[str], task: Task, rounds: int, memory: dict[str, float | None]
) -> tuple[dict[str, Any], list[float]]:
    """Return one line per preset, and the ratios of vanilla to itself. memory: peaks in GiB; on a GPU, filled here."""
    built = {}
    for name in ["vanilla", *names, AGAIN]:
        used = interleaved.gpu_bytes()
        model = build(name, task.overrides)
        # the weights were in fp32 at first
        interleaved.gpu_bytes()
        built[name] = phases_of(model, task)
        if CUDA:
            memory.setdefault(name, interleaved.peak_gib_above(used))
    lines: dict[str, Any] = {
        name: {"cache_bytes": phases.cache_bytes, "peak_memory_gib": memory[name], "seconds": 0.0}
        for name, phases in built.items()
        if name != AGAIN
    }
    again: list[float] = []
    for phase, tokens in (("prefill", task.batch * task.prompt), ("decode", task.batch * task.new)):
        turns = {name: getattr(phases, phase) for name, phases in built.items()}
        seconds = interleaved.measure(turns, rounds, steps=1, warmup=1, settle=1)
        vanilla, ratios = interleaved.twin_baseline(seconds, "vanilla", AGAIN)
        again += ratios
        for name, line in lines.items():
            times = vanilla if name == "vanilla" else seconds[name]
            line[phase] = interleaved.against(times, vanilla, tokens)
            line["seconds"] += sum(times) / rounds
    return lines, again


COLUMNS = ("preset", "prefill us/token", "added", "decode us/token", "added", "us added", "GiB", "cache bytes", "paper")


def markdown(results: reporting.Results) -> str:
    vanilla = results["presets"]["vanilla"]
    lines = []
    for name, line in results["presets"].items():
        # the overhead in prefill and decoding together
        paper = line["paper_seconds"] and line["paper_seconds"] / vanilla["paper_seconds"] - 1
        lines.append(
            (
                name,
                f"{line['prefill']['microseconds_per_token']:,.1f}",
                f"{line['prefill']['overhead']:+.1%}",
                f"{line['decode']['microseconds_per_token']:,.0f}",
                f"{line['decode']['overhead']:+.1%}",
                f"{line['decode']['microseconds_added']:+,.0f}",
                reporting.number(line["peak_memory_gib"], ".2f"),
                f"{line['cache_bytes']:,}",
                reporting.number(paper, "+.2%"),
            )
        )
    return reporting.headed(
        results, reporting.table(COLUMNS, lines), interleaved.twin_note(results["again"], "vanilla")
    )


def main() -> int:
    parser = reporting.parser_of(__doc__, rounds=8, threads=environment.cores())
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py, for all contenders")
    parser.add_argument("--presets", nargs="+", help="mechanisms (default: those of the table, else all)")
    parser.add_argument("--table", choices=sorted(path.stem for path in TABLES.glob("*.yaml")), help="a paper's table")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens after the prompt")
    args = reporting.arguments_of(parser, markdown)
    paper: Any = {} if args.table is None else OmegaConf.to_container(OmegaConf.load(TABLES / f"{args.table}.yaml"))
    if paper:
        args.batch, args.prompt, args.new = paper["batch_size"], paper["prompt"], paper["new"]
    task = Task([*paper.get("overrides", ["size=tiny"]), *args.overrides], args.batch, args.prompt, args.new)
    presets = args.presets or [name for name in paper.get("seconds", mechanisms()) if name != "vanilla"]
    memory: dict[str, float | None] = {}
    if not CUDA:
        memory |= {name: interleaved.peak_memory_gib(prefill_of, name, task) for name in ["vanilla", *presets]}
    shape = [*task.overrides, f"batch={task.batch}", f"prompt={task.prompt}", f"new={task.new}"]
    results: reporting.Results = {"shape": shape, "table": args.table, "again": [], "presets": {}}
    output = args.output or reporting.result_path(f"inference-{args.table}" if args.table else "inference")
    for start in range(0, len(presets), GROUP):
        lines, again = measure_group(presets[start : start + GROUP], task, args.rounds, memory)
        results["again"] += again
        for name, line in lines.items():
            published = {"paper_seconds": paper.get("seconds", {}).get(name)}
            published |= {"paper_gb": paper.get("prefill_gb", {}).get(name)}
            # vanilla is in each group, and the line of the first group is kept
            results["presets"].setdefault(name, line | published)
        interleaved.release()
        reporting.write_json(output, results)
    sizes = {line["cache_bytes"] for line in results["presets"].values()}
    print(f"every cache has the size of vanilla's: {len(sizes) == 1} ({sizes} bytes)")
    try:
        peer = against_transformers(task, args.rounds)
    except Exception as error:
        # the peer is another package, and its failure does not affect the lines above
        peer = {"error": reporting.error_text(error)}
        print(f"error: transformers' generate: {peer['error']}", file=sys.stderr)
    else:
        comparison = "the same" if peer["same_tokens"] else "OTHER"
        print(f"transformers' generate takes {peer['ratio']:.2f} times as long, and generates {comparison} tokens")
    reporting.publish(output, results | {"transformers": peer}, markdown)
    return int("error" in peer)


if __name__ == "__main__":
    sys.exit(main())
