"""`python train.py --help`: the groups with their options, and every key with its default and its words."""

import hydra
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from depthlm.config.explain import available_groups
from depthlm.config.hydra_context import hydra_at_conf
from depthlm.config.keys import keys

USAGE = r"""
[bold]python train.py \[key=value ...][/bold]        train; again: resume, or say that the run is complete
[bold]python train.py -m \[key=a,b ...][/bold]       train each point of a sweep, one after the other
[bold]python train.py dry_run=true ...[/bold]       check everything, print what is derived, take one full-size step
[bold]python train.py --cfg job ...[/bold]          print the composed configuration
[bold]python -m depthlm summary ...[/bold]          parameters, FLOPs and memory of the same configuration

    python train.py size=360m precision=bf16 training.max_tokens=7B
    python train.py -m seed=1,2 optimizer.lr=1e-3,2e-3
"""


def print_help() -> None:
    """Write the whole help to standard output."""
    with hydra_at_conf():
        groups = available_groups(None)
        raw = hydra.compose("config", return_hydra_config=True)
    chosen = raw.hydra.runtime.choices
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    console.print(USAGE.strip() + "\n")
    console.print("[bold]Groups: group=option[/bold]")
    table = Table("group", "options, the default first", box=box.SIMPLE)
    for name, options in groups.items():
        if options:
            table.add_row(name, ", ".join(sorted(options, key=lambda option: option != chosen.get(name))))
    console.print(table)
    console.print("[bold]Keys: key=value[/bold]")
    table = Table("key", "default", "meaning", box=box.SIMPLE)
    section = ""
    for key in keys().values():
        if key.name.rpartition(".")[0] != section:
            table.add_section()
            section = key.name.rpartition(".")[0]
        value = OmegaConf.select(raw, key.name)
        default = "(see the group)" if isinstance(value, DictConfig) else "null" if value is None else str(value)
        choices = f" ({', '.join(key.metadata['choices'])})" if key.metadata["choices"] else ""
        table.add_row(key.name, escape(default), escape(key.metadata["doc"] + choices))
    console.print(table)
    console.print("Exit codes: 0 complete, 2 a mistake in the command, 75 stopped by a signal with all saved, 1 else.")
