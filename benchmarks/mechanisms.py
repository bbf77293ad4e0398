"""The overhead of each mechanism in a training step: every preset against vanilla, interleaved in one run.

    python benchmarks/mechanisms.py [key=value ...] [--presets mhc dca] [--rounds 8] [--output results/...json]
    python benchmarks/mechanisms.py --table depth_attention_step_3b      # a paper's rows, shape and times
    python benchmarks/mechanisms.py --size 1.5b training.batch_size=4    # a large model on a GPU

All take the training step of train.py (DeepSpeed, ZeRO 0) on the same batch, from the same seed. Only one preset and
one vanilla decoder are in memory at once. Vanilla has two turns in each round: a preset is compared with their mean,
and their ratio shows the noise of the machine. The shape is D 512, 24 layers, T 512, batch 4, 8 heads, 4 key/value
heads, vocabulary 4 096, bf16 if the device is fast at it; --size takes one of conf/size instead, and overrides change
it.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import depthlm
from benchmarks.shared import reporting
from benchmarks.shared.decoders import training_of
from benchmarks.shared.interleaved import Step, gpu_bytes, measure, peak_gib_above, release
from depthlm.config import mechanisms
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.machine import environment

SHAPE = ["size.hidden_size=512", "size.intermediate_size=1408", "size.num_layers=24", "size.num_heads=8",
         "size.num_kv_heads=4", "size.head_size=64", "size.vocab_size=4096", "training.sequence_length=512",
         "training.batch_size=4", "tracker=none"]  # fmt: skip
# the table whose times are shown if the command names none
DEFAULT_TABLE = "depth_attention_step_1.5b"
AGAIN = "vanilla again"
Line = dict[str, Any]
# by phase, such as prefill and decoding: the seconds of a preset, and those of vanilla in the same rounds
Seconds = dict[str, tuple[list[float], list[float]]]


def preset_parser(documentation: str | None, tables: Path) -> Any:
    """Return a parser of overrides, presets and a paper's table of this folder."""
    parser = reporting.parser_of(documentation, rounds=8, threads=environment.cores())
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py, for all contenders")
    parser.add_argument("--presets", nargs="+", help="mechanisms (default: those of the table, else all)")
    reporting.add_table(parser, tables)
    return parser


def measure_presets(
    presets: Sequence[str],
    build: Callable[[str], dict[str, Step]],
    line_of: Callable[[str, Seconds], Line],
    rounds: int,
    results: reporting.Results,
    output: Path,
) -> int:
    """Add the lines of vanilla and of the presets to `results`, and write them after each. Return an exit status.

    build: returns the steps of a preset by phase. A preset that fails has a line with its error.
    """

    def warm_up(name: str) -> tuple[dict[str, Step], float | None]:
        used = gpu_bytes()
        steps = build(name)
        for step in steps.values():
            step(), step()
        return steps, peak_gib_above(used)

    def pair(name: str) -> None:
        steps, peak = warm_up(name)
        seconds: dict[str, Seconds] = {"vanilla": {}, name: {}}
        for phase, step in steps.items():
            turns = {"vanilla": vanilla[phase], name: step, AGAIN: vanilla[phase]}
            times = measure(turns, rounds, steps=1, warmup=0, settle=1)
            pairs = list(zip(times[AGAIN], times["vanilla"], strict=True))
            base = [statistics.mean(both) for both in pairs]
            results["again"] += [again / first for again, first in pairs]
            seconds["vanilla"][phase], seconds[name][phase] = (base, base), (times[name], base)
        for contender, memory in (("vanilla", vanilla_peak), (name, peak)):
            # vanilla's line of the first pair is kept
            line = {**line_of(contender, seconds[contender]), "peak_memory_gib": memory}
            results["presets"].setdefault(contender, line)

    results |= {"again": [], "presets": {}}
    vanilla, vanilla_peak = warm_up("vanilla")
    for name in presets:
        try:
            pair(name)
        except Exception as error:
            # the other presets may fit in memory
            results["presets"][name] = {"error": reporting.error_text(error)}
        release()
        reporting.write_json(output, results)
    return int(any("error" in line for line in results["presets"].values()))


def against(times: list[float], baseline: list[float], tokens: int) -> Line:
    """Return a contender's time for this many tokens, and its overhead over the baseline, as a median over rounds."""
    added = statistics.median(time / base for time, base in zip(times, baseline, strict=True)) - 1
    return {
        "overhead": added,
        "microseconds_per_token": 1e6 * min(times) / tokens,
        "microseconds_added": 1e6 * added * statistics.median(baseline) / tokens,
        "seconds": times,
    }


def preset_table(results: reporting.Results, columns: Sequence[str], cells: Callable[[Line], list[str]]) -> str:
    """Return a Markdown table of the presets, and of the noise of the machine. cells: of a line, after its name."""
    rows = [
        [name, *(["error", *[""] * (len(columns) - 2)] if "error" in line else cells(line))]
        for name, line in results["presets"].items()
    ]
    ratios = results["again"]
    noise = max((abs(value - 1) for value in ratios), default=0.0)
    note = f"vanilla again: median {statistics.median(ratios or [1.0]):.3f}, single rounds differ by up to {noise:.1%}"
    return reporting.headed(results, reporting.table(columns, rows), note)


def read_table(name: str) -> tuple[list[str], dict[str, float]]:
    """Read a paper's table of times: (its shape, as overrides; the overhead of each row relative to vanilla's time)."""
    paper = reporting.read_table(reporting.TABLES, name)
    seconds = paper.get("seconds") or {row: 1 / speed for row, speed in paper["batches_per_second"].items()}
    overheads = {row: value / seconds["vanilla"] - 1 for row, value in seconds.items() if row != "vanilla"}
    return [*paper["overrides"], "tracker=none"], overheads


COLUMNS = ("preset", "tokens/s", "us/token", "ratio", "added", "best", "us added", "GiB", "paper")


def markdown(results: reporting.Results) -> str:
    return preset_table(results, COLUMNS, cells)


def cells(line: Line) -> list[str]:
    return [
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
    parser = preset_parser(__doc__, reporting.TABLES)
    parser.add_argument("--size", help="a size of conf/size, at its own sequence length")
    arguments = reporting.arguments_of(parser, markdown)
    if arguments.table and arguments.size:
        parser.error("--size and --table exclude each other")
    shape, paper = read_table(arguments.table or DEFAULT_TABLE)
    if arguments.size:
        shape = [f"size={arguments.size}", "tracker=none"]
    overrides = [*(shape if arguments.table or arguments.size else SHAPE), *arguments.overrides]
    names = list(paper) if arguments.table else [name for name in mechanisms() if name != "vanilla"]
    device = start_distributed(ranks())
    tokens = 0

    def build(name: str) -> dict[str, Any]:
        nonlocal tokens
        # the preset, optionally followed by overrides of it
        preset, *settings = name.split()
        # the compilations of earlier presets count toward a limit, beyond which nothing is compiled
        torch._dynamo.reset()
        trained = training_of(depthlm.compose([*overrides, f"model={preset}", *settings]), device)
        tokens = trained.plan.tokens_per_step
        return {"step": trained.step}

    def line_of(name: str, seconds: Seconds) -> Line:
        times, vanilla = seconds["step"]
        comparison, best = against(times, vanilla, tokens), min(times)
        return {
            "ratio": 1 / (1 + comparison["overhead"]),
            "overhead_of_best": best / min(vanilla) - 1,
            "tokens_per_second": tokens / best,
            **comparison,
            "paper_overhead": paper.get(name),
        }

    results: reporting.Results = {"shape": overrides, "table": arguments.table}
    output = arguments.output or reporting.result_path(arguments.table or "mechanisms")
    status = measure_presets(arguments.presets or names, build, line_of, arguments.rounds, results, output)
    reporting.publish(output, results, markdown)
    return status


if __name__ == "__main__":
    sys.exit(main())
