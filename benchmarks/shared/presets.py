"""Every mechanism against vanilla: the command line, the turns, and the table that training and inference share.

Only one preset and one vanilla decoder are in memory at once. Vanilla has two turns in each round: a preset is compared
with their mean, and their ratio shows the noise of the machine.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import reporting
from benchmarks.shared.interleaved import Step, gpu_bytes, measure, peak_gib_above, release
from depthlm.machine import environment

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

    def built(name: str) -> tuple[dict[str, Step], float | None]:
        used = gpu_bytes()
        steps = build(name)
        for step in steps.values():
            step(), step()
        return steps, peak_gib_above(used)

    def pair(name: str) -> None:
        steps, peak = built(name)
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
    vanilla, vanilla_peak = built("vanilla")
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
