"""`depthlm runs [filter ...]`: list the run directories and the progress of each run."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from depthlm.config.keys import override_text
from depthlm.console import stdout_console
from depthlm.counts import count_text, duration_text
from depthlm.errors import UserError
from depthlm.runs.listing import FIELDS, RunListing, list_runs, read_filters
from depthlm.runs.progress import failure_text, progress_table
from depthlm.streams import printable
from depthlm.sweeps.table import STYLES

DESCRIPTION = """\
List run directories: state, model, size, losses, progress, age. A run must match every filter:

  mhc, failed, tiny           a state, model or size, or a part of the directory below --root
  'outputs/sweep/*'           a pattern for one of these
  model=mhc size='nano_*'     a value, or a pattern for it; != for the others
  'optimizer.lr>1e-3'         any key of config.yaml, by =, !=, <, <=, > or >=
  'loss<3.2' 'tokens>=1M'     a number in summary.json, or the newest in metrics.jsonl
  'age<2d'                    the time since the last change, with the unit s, m, h or d

Quote < and > from the shell. A run without a value does not match a comparison of it. `depthlm report RUN RUN ...`
compares runs."""


def main(arguments: list[str], program: str) -> None:
    """List the runs that match every filter."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("filter", nargs="*", help="a word, a pattern or a comparison, as above")
    parser.add_argument("--root", default="outputs", help="folder that contains the runs (default outputs)")
    parser.add_argument("--sort", metavar="KEY", default="", help="sort by a value (default: by age, newest last)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parsed = parser.parse_intermixed_args(arguments)
    root = Path(parsed.root)
    if not root.is_dir():
        raise UserError(f"--root {root}: no such folder; give the folder that contains the runs")
    listings = list_runs(root, parsed.filter, parsed.sort)
    if parsed.json:
        print(json.dumps([run.fields() for run in listings], indent=1))
    elif parsed.filter and not listings:
        filters = " and ".join(f"`{text}`" for text in parsed.filter)
        print(printable(f"no run below {root} matches {filters}"))
    else:
        comparisons, _ = read_filters(parsed.filter)
        show_runs(listings, root, [*(comparison.key for comparison in comparisons), *filter(None, [parsed.sort])])


def show_runs(runs: Sequence[RunListing], root: Path, keys: Sequence[str] = ()) -> None:
    """Print the runs as a table. keys: additional values to show, by which the user has filtered or sorted."""
    extra = [key for key in dict.fromkeys(keys) if key not in FIELDS]
    rows = []
    for run in runs:
        values = {key: run.values.get(key) for key in extra}
        shown = {key: f"{v:.6g}" if isinstance(v, float) else override_text(v) for key, v in values.items()}
        rows.append(
            {
                "run": escape(run.directory),
                "state": f"[{STYLES[run.state]}]{run.state}[/]",
                "model": escape(run.model),
                "size": escape(run.size),
                **run.progress.texts(),
                "tokens": "" if run.tokens is None else count_text(run.tokens),
                "loss": "" if run.loss is None else f"{run.loss:.4f}",
                "validation": "" if run.validation_loss is None else f"{run.validation_loss:.4f}",
                **{escape(key): "" if values[key] is None else escape(text) for key, text in shown.items()},
                "age": duration_text(run.age),
                "reason": escape(failure_text(run.failure)),
            }
        )
    console = stdout_console()
    console.print(progress_table(rows))
    console.print(f"{len(runs)} run{'' if len(runs) == 1 else 's'} below {escape(str(root))}")
