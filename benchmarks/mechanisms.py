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

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import depthlm
from benchmarks.shared import interleaved, reporting
from benchmarks.shared.decoders import training_of
from depthlm.config import mechanisms
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment

SHAPE = ["size.hidden_size=512", "size.intermediate_size=1408", "size.num_layers=24", "size.num_heads=8",
         "size.num_kv_heads=4", "size.head_size=64", "size.vocab_size=4096", "training.sequence_length=512",
         "training.batch_size=4", "tracker=none"]  # fmt: skip
AGAIN = "vanilla again"
# presets that are in memory at once
GROUP = 7
TABLES = Path(__file__).parent / "tables"
# the table whose times are shown if the command names none
DEFAULT_TABLE = "depth_attention_step_1.5b"
Line = dict[str, Any]
Lines = tuple[dict[str, Line], list[float]]


def read_table(name: str) -> tuple[list[str], dict[str, float]]:
    """Read a paper's table of times: (its shape, as overrides; the overhead of each row relative to vanilla's time)."""
    paper: Any = OmegaConf.to_container(OmegaConf.load(TABLES / f"{name}.yaml"))
    seconds = paper.get("seconds") or {row: 1 / speed for row, speed in paper["batches_per_second"].items()}
    overheads = {row: value / seconds["vanilla"] - 1 for row, value in seconds.items()}
    return [*paper["overrides"], "tracker=none"], overheads


def contender(name: str, overrides: list[str], device: torch.device) -> tuple[interleaved.Step, int]:
    """Return (one training step, its tokens). name: the preset, optionally followed by overrides of it."""
    preset, *settings = ("vanilla" if name == AGAIN else name).split()
    trained = training_of(depthlm.compose([*overrides, f"model={preset}", *settings]), device)
    return trained.step, trained.plan.tokens_per_step


def step_of(name: str, overrides: list[str]) -> interleaved.Step:
    """Return the training step of a preset, for a new process."""
    return contender(name, overrides, start_distributed(ranks()))[0]


def in_groups(
    presets: list[str], overrides: list[str], device: torch.device, rounds: int, memory: dict[str, float]
) -> Iterator[Lines]:
    """Yield the lines of each group, and the ratios of its two vanilla decoders. memory: peaks in GiB, by preset."""
    for start in range(0, len(presets), GROUP):
        names = ["vanilla", *presets[start : start + GROUP], AGAIN]
        built = {name: contender(name, overrides, device) for name in names}
        tokens = built["vanilla"][1]
        seconds = interleaved.measure(
            {name: step for name, (step, _) in built.items()}, rounds, steps=1, warmup=1, settle=1
        )
        yield lines_of(seconds, tokens, memory)
        # the next group needs the memory
        del built
        interleaved.release()


def in_pairs(presets: list[str], overrides: list[str], device: torch.device, rounds: int) -> Iterator[Lines]:
    """Yield what `in_groups` yields, of one preset at a time. A preset that fails has a line with its error."""
    used = interleaved.gpu_bytes()
    vanilla, tokens = contender("vanilla", overrides, device)
    vanilla(), vanilla()
    peaks = {"vanilla": interleaved.peak_gib_above(used)}

    def pair(name: str) -> Lines:
        used = interleaved.gpu_bytes()
        step, _ = contender(name, overrides, device)
        step(), step()
        peaks[name] = interleaved.peak_gib_above(used)
        contenders = {"vanilla": vanilla, name: step, AGAIN: vanilla}
        return lines_of(interleaved.measure(contenders, rounds, steps=1, warmup=0, settle=1), tokens, peaks)

    for name in presets:
        try:
            yield pair(name)
        except Exception as error:
            # the other presets may fit in memory
            yield {name: {"error": reporting.error_text(error)}}, []
        interleaved.release()


def lines_of(seconds: dict[str, list[float]], tokens: int, memory: dict[str, Any]) -> Lines:
    """Return the speed of each preset against vanilla in the same rounds, and the ratios of vanilla's turns."""
    vanilla, again = interleaved.twin_baseline(seconds, "vanilla", AGAIN)
    lines = {}
    for name in (name for name in seconds if name != AGAIN):
        times = vanilla if name == "vanilla" else seconds[name]
        comparison, best = interleaved.against(times, vanilla, tokens), min(times)
        lines[name] = {
            "ratio": 1 / (1 + comparison["overhead"]),
            "overhead_of_best": best / min(vanilla) - 1,
            "tokens_per_second": tokens / best,
            **comparison,
            "peak_memory_gib": memory[name],
        }
    return lines, again


COLUMNS = ("preset", "tokens/s", "us/token", "ratio", "added", "best", "us added", "GiB", "paper")


def markdown(results: reporting.Results) -> str:
    lines = [cells(name, line) for name, line in results["presets"].items()]
    return reporting.headed(
        results, reporting.table(COLUMNS, lines), interleaved.twin_note(results["again"], "vanilla")
    )


def cells(name: str, line: Line) -> list[str]:
    if "error" in line:
        return [name, "error", *[""] * (len(COLUMNS) - 2)]
    return [
        name,
        f"{line['tokens_per_second']:,.0f}",
        microseconds(line["microseconds_per_token"]),
        f"{line['ratio']:.3f}",
        f"{line['overhead']:+.1%}",
        f"{line['overhead_of_best']:+.1%}",
        microseconds(line["microseconds_added"], sign="+"),
        reporting.number(line["peak_memory_gib"], ".2f"),
        reporting.number(line["paper_overhead"], "+.0%"),
    ]


def microseconds(value: float, sign: str = "") -> str:
    """Return the time of a token; that of a GPU is so short that it needs a digit after the point."""
    return f"{value:{sign},.1f}" if abs(value) < 100 else f"{value:{sign},.0f}"


def main() -> int:
    parser = reporting.parser_of(__doc__, rounds=8, threads=environment.cores())
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py, for all contenders")
    parser.add_argument("--presets", nargs="+", help="mechanisms (default: those of the table, else all)")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--table", choices=sorted(path.stem for path in TABLES.glob("*.yaml")), help="a paper's table")
    shapes.add_argument("--size", help="a size of conf/size, at its own sequence length")
    parser.add_argument("--pairs", action="store_true", help="only one preset and vanilla in memory at once")
    arguments = reporting.arguments_of(parser, markdown)
    shape, paper = read_table(arguments.table or DEFAULT_TABLE)
    if arguments.size:
        shape = [f"size={arguments.size}", "tracker=none"]
    overrides = [*(shape if arguments.table or arguments.size else SHAPE), *arguments.overrides]
    names = list(paper) if arguments.table else mechanisms()
    presets = arguments.presets or [name for name in names if name != "vanilla"]
    device = start_distributed(ranks())
    if arguments.pairs:
        groups = in_pairs(presets, overrides, device, arguments.rounds)
    else:
        memory = {name: interleaved.peak_memory_gib(step_of, name, overrides) for name in ["vanilla", *presets]}
        groups = in_groups(presets, overrides, device, arguments.rounds, memory)
    results: reporting.Results = {"shape": overrides, "table": arguments.table, "again": [], "presets": {}}
    output = arguments.output or reporting.result_path(arguments.table or "mechanisms")
    for group, again in groups:
        results["again"] += again
        for name, line in group.items():
            # vanilla is in each group, and the line of the first group is kept
            paper_overhead = None if name == "vanilla" else paper.get(name)
            results["presets"].setdefault(name, {**line, "paper_overhead": paper_overhead})
        reporting.write_json(output, results)
    reporting.publish(output, results, markdown)
    return int(any("error" in line for line in results["presets"].values()))


if __name__ == "__main__":
    sys.exit(main())
