"""`depthlm runs <filters> --prune`: list what would be removed, ask, and remove it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from depthlm.console import stdout_console
from depthlm.counts import bytes_text
from depthlm.errors import UserError
from depthlm.runs.listing import RunListing
from depthlm.runs.removal import Removal, plan_removal, remove
from depthlm.streams import printable


def remove_runs(root: Path, runs: Sequence[RunListing], *, only_checkpoints: bool, yes: bool, as_json: bool) -> None:
    """List what removing these runs removes, and remove it if `yes` is given or the user confirms it.

    Raises UserError if a folder cannot be removed, after the others have been removed.
    """
    planned = plan_removal(root, runs, only_checkpoints)
    wanted = [removal for removal in planned if removal.kept is None]
    if not as_json:
        _show(planned)
        if wanted and not yes and not _confirmed(len(wanted)):
            print("Nothing was removed." if sys.stdin.isatty() else "Nothing was removed; --yes removes them.")
            return
    errors: list[str] = []
    outcomes = {removal.path: _remove(removal, errors, quiet=as_json) for removal in wanted if yes or not as_json}
    if as_json:
        print(json.dumps([_fields(removal, outcomes) for removal in planned], indent=1))
    elif wanted:
        freed = [removal for removal in wanted if outcomes[removal.path] is None]
        print(f"Removed {len(freed)} of {len(wanted)}: {bytes_text(sum(removal.size for removal in freed))} freed.")
    if errors:
        raise UserError("\n".join(errors))


def _remove(removal: Removal, errors: list[str], quiet: bool) -> str | None:
    """Remove a folder; return why it was kept, or None. A failure is appended to `errors`."""
    try:
        kept = remove(removal)
    except OSError as error:
        errors.append(f"{removal.path} cannot be removed ({error}); the next --prune removes what is left of it")
        return str(error)
    if not quiet:
        print(printable(f"kept {removal.path}: {kept}" if kept else f"removed {removal.path}"), flush=True)
    return kept


def _fields(removal: Removal, outcomes: dict[Path, str | None]) -> dict[str, object]:
    removed = removal.path in outcomes and outcomes[removal.path] is None
    return {
        "directory": str(removal.run),
        "state": removal.state,
        "path": str(removal.path),
        "bytes": removal.size,
        "kept": outcomes.get(removal.path, removal.kept),
        "removed": removed,
    }


def _show(planned: Sequence[Removal]) -> None:
    table = Table("would be removed", "state", "size", "", box=box.SIMPLE)
    table.columns[2].justify = "right"
    for removal in planned:
        note = f"kept: {removal.kept}" if removal.kept else ""
        table.add_row(escape(str(removal.path)), removal.state, bytes_text(removal.size), escape(note))
    console = stdout_console()
    console.print(table)
    wanted = [removal for removal in planned if removal.kept is None]
    total = bytes_text(sum(removal.size for removal in wanted))
    console.print(f"{len(wanted)} to remove, {total} in all" if wanted else "nothing to remove")


def _confirmed(count: int) -> bool:
    """Ask on a terminal for the number of folders; false elsewhere."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(f"Type {count} to remove them, or anything else to keep them: ").strip() == str(count)
    except EOFError:
        return False
