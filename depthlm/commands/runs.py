"""`depthlm runs [filter ...]`: list the run directories and the progress of each run, compare runs, or remove them."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Column, Table

from depthlm.console import stdout_console
from depthlm.counts import bytes_text, count_text, duration_text
from depthlm.errors import UserError
from depthlm.runs.listing import RunListing, list_runs, read_filters, value_text
from depthlm.runs.progress import RunProgress, failure_text, progress_table
from depthlm.runs.removal import Removal, plan_removal, remove
from depthlm.streams import printable
from depthlm.sweeps.table import STYLES

COLUMNS = {
    *("directory", "state", "model", "size", "tokens", "loss", "validation_loss", "age", "failure"),
    *RunProgress.__dataclass_fields__,
}
REPORT = "outputs/report"
DESCRIPTION = """\
List run directories: state, model, size, losses, progress, age. A run must match every filter:

  mhc, failed, tiny           a state, model or size, or a part of the directory below --root
  'outputs/sweep/*'           a pattern for one of these
  model=mhc size='nano_*'     a value, or a pattern for it; != for the others
  'optimizer.lr>1e-3'         any key of config.yaml, by =, !=, <, <=, > or >=
  'loss<3.2' 'tokens>=1M'     a number in summary.json, or the newest in metrics.jsonl
  'age<2d'                    the time since the last change, with the unit s, m, h or d

Quote < and > from the shell. A run without a value does not match a comparison of it."""


def main(arguments: list[str], program: str) -> None:
    """List the runs that match every filter, compare runs, or remove runs."""
    parsed = _parser(program).parse_intermixed_args(arguments)
    _check_options(parsed)
    if parsed.compare:
        # drawing takes longer to import than a list takes to print
        from depthlm.report.command import report_runs
        from depthlm.report.runs_report import find_runs

        runs = find_runs(parsed.compare, "--compare ")
        if len(runs) < 2:
            raise UserError(f"--compare: only one run, {runs[0].directory}; name two or more run directories")
        report_runs(runs, parsed.to, "--to ")
        return
    root = Path(parsed.root)
    if not root.is_dir():
        raise UserError(f"--root {root}: no such folder; give the folder that contains the runs")
    listings = list_runs(root, parsed.filter, parsed.sort)
    if parsed.prune:
        remove_runs(root, listings, only_checkpoints=parsed.only_checkpoints, yes=parsed.yes, as_json=parsed.json)
    elif parsed.json:
        print(json.dumps([run.fields() for run in listings], indent=1))
    elif parsed.filter and not listings:
        filters = " and ".join(f"`{text}`" for text in parsed.filter)
        print(printable(f"no run below {root} matches {filters}"))
    else:
        comparisons, _ = read_filters(parsed.filter)
        show_runs(listings, root, [*(comparison.key for comparison in comparisons), *filter(None, [parsed.sort])])


def show_runs(runs: Sequence[RunListing], root: Path, keys: Sequence[str] = ()) -> None:
    """Print the runs as a table. keys: additional values to show, by which the user has filtered or sorted."""
    extra = [key for key in dict.fromkeys(keys) if key not in COLUMNS]
    rows = []
    for run in runs:
        values = {key: run.values.get(key) for key in extra}
        shown = {key: f"{v:.6g}" if isinstance(v, float) else value_text(v) for key, v in values.items()}
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


def remove_runs(root: Path, runs: Sequence[RunListing], *, only_checkpoints: bool, yes: bool, as_json: bool) -> None:
    """List what removing these runs removes, and remove it if `yes` is given or the user confirms it.

    Raises UserError if a folder cannot be removed, after the others have been removed.
    """
    planned = plan_removal(root, runs, only_checkpoints)
    removable = [removal for removal in planned if removal.kept is None]
    if not as_json:
        _show_removals(planned)
        if removable and not yes and not _ask_to_confirm(len(removable)):
            print("Nothing was removed." if sys.stdin.isatty() else "Nothing was removed; --yes removes them.")
            return
    errors: list[str] = []
    outcomes = {removal.path: _remove(removal, errors, quiet=as_json) for removal in removable if yes or not as_json}
    if as_json:
        print(json.dumps([_removal_fields(removal, outcomes) for removal in planned], indent=1))
    elif removable:
        freed = [removal for removal in removable if outcomes[removal.path] is None]
        print(f"Removed {len(freed)} of {len(removable)}: {bytes_text(sum(removal.size for removal in freed))} freed.")
    if errors:
        raise UserError("\n".join(errors))


def _parser(program: str) -> argparse.ArgumentParser:
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
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="RUN",
        help="instead of a list, compare these run directories: their results, the settings that differ, and their "
        "loss curves in one picture",
    )
    parser.add_argument("--to", metavar="FOLDER", default=None, help=f"folder of the comparison (default {REPORT})")
    parser.add_argument(
        "--prune", action="store_true", help="list what removing the matching runs would free; --yes removes them"
    )
    parser.add_argument(
        "--only-checkpoints", action="store_true", help="with --prune: remove only checkpoints/, and keep the results"
    )
    parser.add_argument("--yes", action="store_true", help="with --prune: remove without asking")
    return parser


def _check_options(parsed: argparse.Namespace) -> None:
    """Set the folder of a comparison. Raises UserError for options that do not go together, naming all of them."""
    errors = []
    if parsed.compare:
        options = {"--prune": parsed.prune, "--json": parsed.json, "--sort": parsed.sort, "a filter": parsed.filter}
        errors = [
            f"{name} does not go with --compare, which names its runs" for name, value in options.items() if value
        ]
    elif parsed.to is not None:
        errors.append("--to is the folder of a comparison; add --compare A B")
    if not parsed.prune:
        options = {"--yes": parsed.yes, "--only-checkpoints": parsed.only_checkpoints}
        errors += [f"{name} only goes with --prune" for name, value in options.items() if value]
    elif not parsed.filter and not parsed.compare:
        errors.append("--prune needs a filter, so that no run is removed by mistake; `'directory=*'` matches every run")
    elif words := read_filters(parsed.filter)[1]:
        errors.append(
            f"--prune takes comparisons only, since a word such as `{words[0]}` also matches parts of directories; "
            "write `state=failed`, `model=mhc` or `'directory=*/sweep/*'`"
        )
    if errors:
        raise UserError("\n".join(errors))
    parsed.to = parsed.to or REPORT


def _remove(removal: Removal, errors: list[str], quiet: bool) -> str | None:
    """Remove a folder; return why it was kept, or None. A failure is appended to `errors`."""
    try:
        reason = remove(removal)
    except OSError as error:
        errors.append(f"{removal.path} cannot be removed ({error}); the next --prune removes what is left of it")
        return str(error)
    if not quiet:
        print(printable(f"kept {removal.path}: {reason}" if reason else f"removed {removal.path}"), flush=True)
    return reason


def _removal_fields(removal: Removal, outcomes: dict[Path, str | None]) -> dict[str, object]:
    removed = removal.path in outcomes and outcomes[removal.path] is None
    return {
        "directory": str(removal.run),
        "state": removal.state,
        "path": str(removal.path),
        "bytes": removal.size,
        "kept": outcomes.get(removal.path, removal.kept),
        "removed": removed,
    }


def _show_removals(planned: Sequence[Removal]) -> None:
    table = Table("would be removed", "state", Column("size", justify="right"), "", box=box.SIMPLE)
    for removal in planned:
        note = f"kept: {removal.kept}" if removal.kept else ""
        table.add_row(escape(str(removal.path)), removal.state, bytes_text(removal.size), escape(note))
    console = stdout_console()
    console.print(table)
    removable = [removal for removal in planned if removal.kept is None]
    total = bytes_text(sum(removal.size for removal in removable))
    console.print(f"{len(removable)} to remove, {total} in all" if removable else "nothing to remove")


def _ask_to_confirm(count: int) -> bool:
    """Return whether the user, asked on a terminal, types the number of folders; false without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(f"Type {count} to remove them, or anything else to keep them: ").strip() == str(count)
    except EOFError:
        return False
