"""What the benchmarks share beside measuring: the command line, the JSON with the machine in it, and Markdown tables.

torch is imported only where it is used, because rehearsal.py installs its fake GPU before torch starts.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Results = dict[str, Any]
Markdown = Callable[[Results], str]
FOLDER, TABLES = (Path(__file__).parents[1] / name for name in ("results", "tables"))


def parser_of(
    documentation: str | None, rounds: int | None = None, threads: int | None = None, processes: int | None = None
) -> Any:
    """Return a parser with --output, and with --rounds, --threads and --processes where a default is given."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    if threads is not None:
        parser.add_argument("--threads", type=int, default=threads, help="CPU threads (default: %(default)s)")
    if processes is not None:
        parser.add_argument("--processes", type=int, default=processes, help="side by side (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="the JSON (default: one in benchmarks/results)")
    return parser


def add_table(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Add --table, which names a paper's table of this folder."""
    parser.add_argument("--table", choices=sorted(path.stem for path in folder.glob("*.yaml")), help="a paper's table")


def read_table(folder: Path, name: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((folder / f"{name}.yaml").read_text())


def arguments_of(parser: argparse.ArgumentParser, markdown: Markdown) -> argparse.Namespace:
    """Parse the command line and set the number of threads. --markdown prints earlier results and ends the command."""
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the results of an earlier run as Markdown")
    arguments = parser.parse_intermixed_args()
    if arguments.markdown:
        try:
            print(markdown(json.loads(arguments.markdown.read_text())))
        except (OSError, ValueError, KeyError) as error:
            cause = f"{type(error).__name__}: {error}"
            parser.error(f"--markdown {arguments.markdown}: no results of this script ({cause})")
        raise SystemExit(0)
    if "threads" in arguments:
        import torch

        torch.set_num_threads(arguments.threads)
    return arguments


def result_path(benchmark: str) -> Path:
    """Return the path for the results of a benchmark on this machine."""
    import torch

    name = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else platform.node()
    return FOLDER / f"{benchmark}-{name}.json"


def write_json(path: Path, results: Results) -> Results:
    """Write results with the machine that they were measured on, and return both. A stop leaves the earlier file."""
    import torch

    from depthlm.files import replace_text
    from depthlm.machine import environment

    machine = environment.describe(environment.device_type())
    for name in ("command", "code"):
        machine.pop(name)
    machine["threads"] = torch.get_num_threads()
    machine["load_average"] = os.getloadavg()
    written = {"machine": machine, **results}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(written, indent=1) + "\n")
    return written


def publish(path: Path, results: Results, markdown: Markdown) -> None:
    """Write results, and print them as Markdown."""
    print(markdown(write_json(path, results)))
    print(f"written to {path}")


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    columns = list(header)
    rows = [f"| {' | '.join(row)} |" for row in (columns, *map(list, lines))]
    return "\n".join([rows[0], f"|{'---|' * len(columns)}", *rows[1:]])


def headed(results: Results, text: str, *notes: str) -> str:
    """Return a text below a line that names the machine, and the notes."""
    machine = results["machine"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    head = ", ".join([machine["device"], threads, f"torch {machine['versions']['torch']}"])
    return f"{'; '.join([head, *notes])}:\n\n{text}"


def number(value: float | None, form: str) -> str:
    """Return a number in this format, or nothing if there is none."""
    return "" if value is None else f"{value:{form}}"


def error_text(error: Exception) -> str:
    """Return an error in one line, for a result that could not be measured."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
