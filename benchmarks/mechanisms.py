"""The overhead of each mechanism in a training step: every preset against vanilla, interleaved in one run.

    python benchmarks/mechanisms.py [key=value ...] [--presets mhc dca] [--rounds 8] [--output results/...json]
    python benchmarks/mechanisms.py --table depth_attention_step_3b      # a paper's rows, shape and times
    python benchmarks/mechanisms.py --size 1.5b training.batch_size=4 --pairs        # a large model on a GPU

All take the training step of train.py (DeepSpeed, ZeRO 0) on the same batch, from the same seed. Presets take turns in
groups, each with two vanilla decoders: a round is compared with their mean, and their ratio shows the noise of the
machine. The shape is D 512, 24 layers, T 512, batch 4, 8 heads, 4 key/value heads, vocabulary 4 096, bf16 if the device
is fast at it; --size takes one of conf/size instead, and overrides change it. With --pairs, only one preset and one
vanilla decoder are in memory at once; vanilla's second turn is then of the same decoder, and peak memory is measured in
this process.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
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
    release,
    result_path,
    write_json,
)
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

import depthlm
from depthlm.config import mechanisms
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment
from depthlm.model import compile_sublayers
from depthlm.training.engine import build_engine
from depthlm.training.plan import make_plan
from depthlm.training.setup import compiles
from depthlm.training.step import train_step

SHAPE = ["size.hidden_size=512", "size.intermediate_size=1408", "size.num_layers=24", "size.num_heads=8",
         "size.num_kv_heads=4", "size.head_size=64", "size.vocab_size=4096", "training.sequence_length=512",
         "training.batch_size=4", "tracker=none"]  # fmt: skip
AGAIN = "vanilla again"
# presets that are in memory at once
GROUP = 7
TABLES = Path(__file__).parent / "tables"
# the table whose times are shown if the command names none
DEFAULT_TABLE = "depth_attention_step_1.5b"


def read_table(name: str) -> tuple[list[str], dict[str, float]]:
    """Read a paper's table of times: (its shape, as overrides; the overhead of each row relative to vanilla's time)."""
    table: Any = OmegaConf.to_container(OmegaConf.load(TABLES / f"{name}.yaml"))
    seconds = table.get("seconds") or {row: 1 / speed for row, speed in table["batches_per_second"].items()}
    return [*table["overrides"], "tracker=none"], {
        row: value / seconds["vanilla"] - 1 for row, value in seconds.items()
    }


def contender(name: str, overrides: list[str], device: torch.device) -> tuple[Step, int]:
    """Return (one training step, its tokens). name: the preset, optionally followed by its own overrides."""
    preset, *own = ("vanilla" if name == AGAIN else name).split()
    config = depthlm.compose([*overrides, f"model={preset}", *own])
    plan = make_plan(config, ranks())
    model = depthlm.build_model(config, device)
    model.checkpoint_activations(config.training.activation_checkpointing)
    if compiles(config, device):
        compile_sublayers(model)
    engine = build_engine(config, plan, model)
    shape = (plan.accumulation, plan.micro_batch_size, plan.sequence_length + 1)
    batch = torch.randint(config.size.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    return (lambda: train_step(engine, batch, plan, 0.0).item()), plan.tokens_per_step


Line = dict[str, Any]


def in_groups(
    presets: list[str], overrides: list[str], device: torch.device, rounds: int, memory: dict[str, float]
) -> Iterator[tuple[dict[str, Line], list[float]]]:
    """Yield the lines of each group, and the ratios of its two vanilla decoders. memory: peaks in GiB, by preset."""
    for start in range(0, len(presets), GROUP):
        names = ["vanilla", *presets[start : start + GROUP], AGAIN]
        built = {name: contender(name, overrides, device) for name in names}
        tokens = built["vanilla"][1]
        seconds = measure({name: step for name, (step, _) in built.items()}, rounds, steps=1, warmup=1, settle=1)
        yield lines(seconds, tokens, memory)
        # the next group needs the memory
        del built
        release()


def in_pairs(
    presets: list[str], overrides: list[str], device: torch.device, rounds: int
) -> Iterator[tuple[dict[str, Line], list[float]]]:
    """Yield what `in_groups` yields, of one preset at a time. A preset that fails has a line with its error."""
    used = gpu_bytes()
    vanilla, tokens = contender("vanilla", overrides, device)
    vanilla(), vanilla()
    peaks = {"vanilla": peak_gib_above(used)}

    def pair(name: str) -> tuple[dict[str, Line], list[float]]:
        used = gpu_bytes()
        step, _ = contender(name, overrides, device)
        step(), step()
        peaks[name] = peak_gib_above(used)
        contenders = {"vanilla": vanilla, name: step, AGAIN: vanilla}
        return lines(measure(contenders, rounds, steps=1, warmup=0, settle=1), tokens, peaks)

    for name in presets:
        try:
            yield pair(name)
        except Exception as error:
            # the other presets may fit in memory
            yield {name: {"error": error_text(error)}}, []
        release()


def lines(seconds: dict[str, list[float]], tokens: int, memory: dict[str, Any]) -> tuple[dict[str, Line], list[float]]:
    """Return the line of each preset, and the ratios of the two turns of vanilla."""
    both = [statistics.mean(pair) for pair in zip(seconds["vanilla"], seconds[AGAIN], strict=True)]
    again = [a / b for a, b in zip(seconds[AGAIN], seconds["vanilla"], strict=True)]
    names = [name for name in seconds if name != AGAIN]
    return {
        name: row(both if name == "vanilla" else seconds[name], both, tokens) | {"peak_memory_gib": memory[name]}
        for name in names
    }, again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py, for all contenders")
    parser.add_argument("--presets", nargs="+", help="mechanisms (default: those of the table, else all)")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--table", choices=sorted(path.stem for path in TABLES.glob("*.yaml")), help="a paper's table")
    shapes.add_argument("--size", help="a size of conf/size, at its own sequence length")
    parser.add_argument("--pairs", action="store_true", help="only one preset and vanilla in memory at once")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=environment.cores(), help="CPU threads (default: all cores)")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--memory-from", type=Path, metavar="JSON", help="take peak memory from an earlier run")
    parser.add_argument("--memory-of", metavar="PRESET", help=argparse.SUPPRESS)
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the results of an earlier run as Markdown")
    arguments = parser.parse_intermixed_args()
    if arguments.markdown:
        print(markdown(json.loads(arguments.markdown.read_text())))
        return 0
    shape, paper = read_table(arguments.table or DEFAULT_TABLE)
    if arguments.size:
        shape = [f"size={arguments.size}", "tracker=none"]
    overrides = [*(shape if arguments.table or arguments.size else SHAPE), *arguments.overrides]
    names = list(paper) if arguments.table else mechanisms()
    presets = arguments.presets or [name for name in names if name != "vanilla"]
    torch.set_num_threads(arguments.threads)
    device = start_distributed(ranks())
    if arguments.memory_of:
        print_peak_memory(contender(arguments.memory_of, overrides, device)[0])
        return 0
    if arguments.pairs:
        groups = in_pairs(presets, overrides, device, arguments.rounds)
    else:
        if arguments.memory_from:
            earlier = json.loads(arguments.memory_from.read_text())["presets"]
            memory = {name: earlier[name]["peak_memory_gib"] for name in ["vanilla", *presets]}
        else:
            shown = [f"--{key}={value}" for key in ("table", "size") if (value := getattr(arguments, key))]
            memory = {n: peak_memory_gib(__file__, n, *shown, *arguments.overrides) for n in ["vanilla", *presets]}
        groups = in_groups(presets, overrides, device, arguments.rounds, memory)
    results: dict[str, Any] = {"shape": overrides, "table": arguments.table, "again": [], "presets": {}}
    output = arguments.output or result_path(arguments.table or "mechanisms")
    for group, again in groups:
        results["again"] += again
        for name, line in group.items():
            # vanilla is in each group, and the line of the first group is kept
            paper_overhead = None if name == "vanilla" else paper.get(name)
            results["presets"].setdefault(name, {**line, "paper_overhead": paper_overhead})
        write_json(output, results)
    Console(highlight=False).print(table(results))
    print(f"written to {output}")
    return int(any("error" in line for line in results["presets"].values()))


def row(times: list[float], vanilla: list[float], tokens: int) -> dict[str, Any]:
    """Return one preset's speed, compared with vanilla's in the same rounds."""
    comparison, best = against(times, vanilla, tokens), min(times)
    return {
        "ratio": 1 / (1 + comparison["overhead"]),
        "overhead_of_best": best / min(vanilla) - 1,
        "tokens_per_second": tokens / best,
        **comparison,
    }


COLUMNS = ("preset", "tokens/s", "us/token", "ratio", "added", "best", "us added", "GiB", "paper")


def cells(name: str, line: dict[str, Any]) -> list[str]:
    """Return the cells of one preset's line."""
    if "error" in line:
        return [name, "error", *[""] * (len(COLUMNS) - 2)]
    paper, gib = line["paper_overhead"], line["peak_memory_gib"]
    return [
        name,
        f"{line['tokens_per_second']:,.0f}",
        microseconds(line["microseconds_per_token"]),
        f"{line['ratio']:.3f}",
        f"{line['overhead']:+.1%}",
        f"{line['overhead_of_best']:+.1%}",
        microseconds(line["microseconds_added"], sign="+"),
        "" if gib is None else f"{gib:.2f}",
        "" if paper is None else f"{paper:+.0%}",
    ]


def microseconds(value: float, sign: str = "") -> str:
    """Return the time of a token; that of a GPU is so short that it needs a digit after the point."""
    return f"{value:{sign},.1f}" if abs(value) < 100 else f"{value:{sign},.0f}"


def table(results: dict[str, Any]) -> Table:
    spread = max((abs(value - 1) for value in results["again"]), default=0.0)
    median = statistics.median(results["again"] or [1.0])
    shown = Table(*COLUMNS, caption=f"vanilla again: median {median:.3f}, single rounds differ by up to {spread:.1%}")
    for name, line in results["presets"].items():
        shown.add_row(*cells(name, line))
    return shown


def markdown(results: dict[str, Any]) -> str:
    machine = results["machine"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    text = [f"{machine['device']}, {threads}, torch {machine['versions']['torch']}:", ""]
    text += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    text += [f"| {' | '.join(cells(name, line))} |" for name, line in results["presets"].items()]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
