"""`python -m depthlm doctor`: look at everything, print it, and say whether a run would start."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from depthlm.doctor import software
from depthlm.doctor.item import OK, PROBLEM, WARNING, Item

COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


def doctor(overrides: Sequence[str], config_dir: str | None, as_json: bool) -> int:
    """Print what a run with these overrides would meet here. Returns the exit code: 1 where it would not start."""
    found = list(examine(overrides, config_dir))
    problems = [item for item in found if item.state == PROBLEM]
    if as_json:
        print(json.dumps({"starts": not problems, "items": [asdict(item) for item in found]}, indent=1))
    else:
        show(found)
    return 1 if problems else 0


def examine(overrides: Sequence[str], config_dir: str | None) -> Iterator[Item]:
    """Look at one thing after the other; without torch, only at what is installed."""
    yield from look_at("Python", software.python)
    yield from look_at("packages", software.packages)
    imported = software.imports()
    yield imported
    if imported.state == PROBLEM:
        return
    # it imports torch
    from depthlm.doctor.run import looks

    for name, look in looks(overrides, config_dir).items():
        yield from look_at(name, look)


def look_at(name: str, look: Callable[[], Item | Iterable[Item]]) -> Iterator[Item]:
    """What one look finds. An exception is a problem of its own, and does not hide the other items."""
    try:
        found = look()
        yield from [found] if isinstance(found, Item) else found
    except Exception as error:
        yield Item(name, f"cannot be looked at: {type(error).__name__}: {error}", PROBLEM, "report this as a bug")


def show(found: Sequence[Item]) -> None:
    """Print a row an item, what to do about it below it, and the outcome."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in found:
        color = COLORS[item.state]
        remedy = f"\n[{color}]->[/] {escape(item.remedy)}" if item.remedy else ""
        table.add_row(f"[{color}]{item.state}[/]", item.name, escape(item.value) + remedy)
    console.print(table)
    problems, warnings = (sum(item.state == state for item in found) for state in (PROBLEM, WARNING))
    noted = f"; warnings: {warnings}" if warnings else ""
    if problems:
        console.print(f"[bold red]A run would not start here: problems: {problems}{noted}.[/]")
    else:
        console.print(f"A run would start here{noted}.")
