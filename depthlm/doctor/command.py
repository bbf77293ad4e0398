"""The command `python -m depthlm doctor`: run all checks, print them, and say whether a run would start."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.markup import escape
from rich.table import Table

from depthlm.console import stdout_console
from depthlm.doctor import software
from depthlm.doctor.software import OK, PROBLEM, WARNING, Item

COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


def doctor(overrides: Sequence[str], config_dir: str | None, as_json: bool) -> int:
    """Check and print whether a run with these overrides would start here. Returns the exit code: 1 if not, else 0."""
    items = list(examine(overrides, config_dir))
    problems = [item for item in items if item.state == PROBLEM]
    if as_json:
        print(json.dumps({"starts": not problems, "items": [asdict(item) for item in items]}, indent=1))
    else:
        show(items)
    return 1 if problems else 0


def examine(overrides: Sequence[str], config_dir: str | None) -> Iterator[Item]:
    """Yield the items of all checks. If torch cannot be imported, only the installation is checked."""
    yield from run_check("Python", software.python)
    yield from run_check("packages", software.packages)
    imported = software.imports()
    yield imported
    if imported.state == PROBLEM:
        return
    # this module imports torch
    from depthlm.doctor.run import checks

    for name, check in checks(overrides, config_dir).items():
        yield from run_check(name, check)


def run_check(name: str, check: Callable[[], Item | Iterable[Item]]) -> Iterator[Item]:
    """Yield the items of one check. An exception becomes an item with a problem and does not hide the other items."""
    try:
        result = check()
        yield from [result] if isinstance(result, Item) else result
    except Exception as error:
        yield Item(name, f"this check failed: {type(error).__name__}: {error}", PROBLEM, "report this as a bug")


def show(items: Sequence[Item]) -> None:
    """Print one row per item, with its remedy below, and the outcome."""
    console = stdout_console()
    if not console.is_terminal:
        console.width = 120
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in items:
        color = COLORS[item.state]
        remedy = f"\n[{color}]->[/] {escape(item.remedy)}" if item.remedy else ""
        table.add_row(f"[{color}]{item.state}[/]", item.name, escape(item.value) + remedy)
    console.print(table)
    problems, warnings = (sum(item.state == state for item in items) for state in (PROBLEM, WARNING))
    warning_text = f"; warnings: {warnings}" if warnings else ""
    if problems:
        console.print(f"[bold red]A run would not start here: problems: {problems}{warning_text}.[/]")
    else:
        console.print(f"A run would start here{warning_text}.")
