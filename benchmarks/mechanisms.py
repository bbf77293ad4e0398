"""The overhead of each mechanism in a training step: every preset against vanilla, interleaved in one run.

    python benchmarks/mechanisms.py [key=value ...] [--presets mhc dca] [--rounds 8] [--output results/...json]
    python benchmarks/mechanisms.py --table depth_attention_step_3b      # a paper's rows, shape and times
    python benchmarks/mechanisms.py --size 1.5b training.batch_size=4    # a large model on a GPU

All take the training step of train.py (DeepSpeed, ZeRO 0) on the same batch, from the same seed, in turns with vanilla
(`shared/presets.py`). The shape is D 512, 24 layers, T 512, batch 4, 8 heads, 4 key/value heads, vocabulary 4 096, bf16
if the device is fast at it; --size takes one of conf/size instead, and overrides change it.
"""

import sys
from typing import Any

import depthlm
from benchmarks.shared import presets, reporting
from benchmarks.shared.decoders import training_of
from depthlm.config import mechanisms
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed

SHAPE = ["size.hidden_size=512", "size.intermediate_size=1408", "size.num_layers=24", "size.num_heads=8",
         "size.num_kv_heads=4", "size.head_size=64", "size.vocab_size=4096", "training.sequence_length=512",
         "training.batch_size=4", "tracker=none"]  # fmt: skip
# the table whose times are shown if the command names none
DEFAULT_TABLE = "depth_attention_step_1.5b"


def read_table(name: str) -> tuple[list[str], dict[str, float]]:
    """Read a paper's table of times: (its shape, as overrides; the overhead of each row relative to vanilla's time)."""
    paper = reporting.read_table(reporting.TABLES, name)
    seconds = paper.get("seconds") or {row: 1 / speed for row, speed in paper["batches_per_second"].items()}
    overheads = {row: value / seconds["vanilla"] - 1 for row, value in seconds.items() if row != "vanilla"}
    return [*paper["overrides"], "tracker=none"], overheads


COLUMNS = ("preset", "tokens/s", "us/token", "ratio", "added", "best", "us added", "GiB", "paper")


def markdown(results: reporting.Results) -> str:
    return presets.preset_table(results, COLUMNS, cells)


def cells(line: presets.Line) -> list[str]:
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
    parser = presets.preset_parser(__doc__, reporting.TABLES)
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
        trained = training_of(depthlm.compose([*overrides, f"model={preset}", *settings]), device)
        tokens = trained.plan.tokens_per_step
        return {"step": trained.step}

    def line_of(name: str, seconds: presets.Seconds) -> presets.Line:
        times, vanilla = seconds["step"]
        comparison, best = presets.against(times, vanilla, tokens), min(times)
        return {
            "ratio": 1 / (1 + comparison["overhead"]),
            "overhead_of_best": best / min(vanilla) - 1,
            "tokens_per_second": tokens / best,
            **comparison,
            "paper_overhead": paper.get(name),
        }

    results: reporting.Results = {"shape": overrides, "table": arguments.table}
    output = arguments.output or reporting.result_path(arguments.table or "mechanisms")
    status = presets.measure_presets(arguments.presets or names, build, line_of, arguments.rounds, results, output)
    reporting.publish(output, results, markdown)
    return status


if __name__ == "__main__":
    sys.exit(main())
