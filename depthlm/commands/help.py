"""`python train.py --help [topic]`: groups with their options, and keys with their defaults and meanings."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from depthlm.config.classes import check_target
from depthlm.config.hydra_context import available_groups, comment, compose_raw, hydra_at_conf
from depthlm.config.keys import Key, keys, override_text
from depthlm.config.resolve import COMPOSING
from depthlm.config.validate.explain import option_file
from depthlm.console import stdout_console
from depthlm.errors import UserError, nearest

USAGE = r"""
[bold]python train.py \[key=value ...][/bold]        train a run; resume it if it was interrupted
[bold]python train.py run=<directory> ...[/bold]    resume a run, or start a new one from its configuration
[bold]python train.py -m \[key=a,b ...][/bold]       train each point of a sweep, one after the other
[bold]python train.py dry_run=true ...[/bold]       check everything, print derived values, run one full-size step
[bold]python train.py --cfg job ...[/bold]          print the composed configuration
[bold]python train.py --help <topic> ...[/bold]     a group (model, training), option (model=dca) or key (optimizer.lr)
[bold]python -m depthlm <command> ...[/bold]        summary, runs, report, evaluate, ...: `python -m depthlm --help`

    python train.py size=360m precision=bf16 training.max_tokens=7B
    python train.py -m seed=1,2 optimizer.lr=1e-3,2e-3
    eval "$(python train.py -sc install=bash)"      completion of groups, options and keys in this shell
"""


def print_help(topics: Sequence[str], config_dir: str | Path | None) -> None:
    """Print the help of each topic, or the complete help. Raises UserError for an unknown topic."""
    console = stdout_console(redirected_width=120)
    groups = available_groups(config_dir)
    with hydra_at_conf():
        raw = hydra.compose("config", return_hydra_config=True)
    for topic in topics:
        group, equals, option = topic.partition("=")
        if equals:
            if option not in groups.get(group, ()):
                close = nearest(option, groups.get(group, ())) or nearest(group, groups)
                raise UserError(f"--help {topic}: no such option{close}")
            show_option(console, group, option, config_dir)
        else:
            show_topic(console, topic, groups, config_dir, raw)
    if not topics:
        show_all(console, groups, raw)


def show_all(console: Console, groups: dict[str, list[str]], raw: DictConfig) -> None:
    """Print every group with its options, and every key. raw: the default configuration, including Hydra's own."""
    console.print(USAGE.strip() + "\n")
    console.print("[bold]Groups: group=option[/bold]")
    table = Table("group", "options, the default first", box=box.SIMPLE)
    defaults = raw.hydra.runtime.choices
    for name, options in groups.items():
        table.add_row(name, ", ".join(sorted(options, key=lambda option: option != defaults.get(name))))
    console.print(table)
    console.print("[bold]Keys: key=value[/bold]")
    console.print(key_table(keys().values(), raw))
    console.print(
        "Exit codes: 0 complete, 2 invalid command, 75 stopped by a signal with everything saved, "
        "130 interrupted before training, 1 any other failure."
    )


def show_topic(
    console: Console, topic: str, groups: dict[str, list[str]], config_dir: str | Path | None, raw: DictConfig
) -> None:
    """Print a group: its options with their descriptions, and the keys of its section; or print one key."""
    topic_keys = [key for key in keys().values() if key.name == topic or key.name.startswith(f"{topic}.")]
    if topic not in groups and not topic_keys:
        raise UserError(f"--help {topic}: no such group or key{nearest(topic, [*groups, *keys()])}")
    if topic in groups:
        table = Table(topic, "", box=box.SIMPLE)
        default = raw.hydra.runtime.choices.get(topic)
        for option in groups[topic]:
            words = escape(describe_option(topic, option, config_dir))
            table.add_row(option, f"{words} [dim](the default)[/dim]" if option == default else words)
        console.print(table)
        console.print(f"`--help {topic}={groups[topic][0]}` shows what an option sets.\n", markup=False)
    if topic_keys:
        console.print(key_table(topic_keys, raw))


def describe_option(group: str, option: str, config_dir: str | Path | None) -> str:
    """Describe an option: the title of an experiment, and the comment at the top of the option's file."""
    file = option_file(group, option, config_dir)
    title = None
    if group == "experiment":
        with suppress(*COMPOSING):
            # training and --help of the option itself report an invalid file
            title = OmegaConf.select(OmegaConf.load(file), "experiment.title")
    return ". ".join(text for text in (title, " ".join(comment(file))) if text)


def show_option(console: Console, group: str, option: str, config_dir: str | Path | None) -> None:
    """Print what an option is and sets; for a mechanism, print the docstrings and settings of its classes."""
    file = option_file(group, option, config_dir)
    console.print(f"[bold]{group}={option}[/bold]  [dim]{escape(str(file))}[/dim]")
    console.print(describe_option(group, option, config_dir) + "\n", markup=False)
    parts = {"model": ("connection", "attention"), "model/connection": ("",), "model/attention": ("",)}.get(group)
    if parts is None:
        text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
        console.print(text, markup=False, soft_wrap=True)
        return
    with hydra_at_conf():
        raw = compose_raw([f"{group}={option}"], config_dir)
    for part in parts:
        name = f"model.{part}" if part else group.replace("/", ".")
        show_class(console, name, OmegaConf.select(raw, name))


def show_class(console: Console, name: str, settings: DictConfig) -> None:
    """Print the docstring of a connection or attention class, and each setting with its value and meaning."""
    if errors := check_target(name, settings):
        raise UserError("\n".join(errors))
    mechanism_class = get_class(settings["_target_"])
    console.print(f"[bold]{name}[/bold]: {mechanism_class.__module__}.{mechanism_class.__qualname__}\n")
    console.print(inspect.getdoc(mechanism_class) or "", markup=False, soft_wrap=True)
    table = Table("setting", "value", "default", "meaning", box=box.SIMPLE)
    for row in setting_rows(name, mechanism_class, settings):
        table.add_row(*map(escape, row))
    console.print(table if table.row_count else "\nno settings\n")


def setting_rows(name: str, mechanism_class: type, settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, default and meaning of each setting of a connection or attention class."""
    meanings = setting_meanings(inspect.getdoc(mechanism_class) or "")
    for parameter in inspect.signature(mechanism_class).parameters.values():
        if parameter.name not in ("spec", "size", "backbone") and parameter.kind is not parameter.VAR_KEYWORD:
            default = "" if parameter.default is parameter.empty else override_text(parameter.default)
            value = override_text(settings[parameter.name]) if parameter.name in settings else default
            yield f"{name}.{parameter.name}", value, default, meanings.get(parameter.name, "")


def setting_meanings(docstring: str) -> dict[str, str]:
    """Return the meaning of each parameter in a docstring, from lines `name: meaning` or `a, b: meaning`."""
    meanings: dict[str, str] = {}
    current: list[str] = []
    for line in docstring.splitlines():
        match = re.match(r"(\w+(?:, \w+)*): (.+)", line)
        if match:
            current = match[1].split(", ")
            meanings |= dict.fromkeys(current, match[2])
        elif line.startswith("    ") and current:
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in current}
        else:
            current = []
    return meanings


def key_table(shown: Iterable[Key], raw: DictConfig) -> Table:
    """Return a table of keys with their defaults and meanings."""
    table = Table(Column("key", no_wrap=True), "default", "meaning", box=box.SIMPLE)
    section = ""
    for key in shown:
        if key.name.rpartition(".")[0] != section:
            table.add_section()
            section = key.name.rpartition(".")[0]
        choices = f" ({', '.join(key.choices)})" if key.choices else ""
        table.add_row(key.name, escape(default_text(raw, key.name)), escape(key.doc + choices))
    return table


def default_text(raw: DictConfig, name: str) -> str:
    """Return the default of a key as an override spells it."""
    value = OmegaConf.select(raw, name, throw_on_resolution_failure=False)
    return "(see the group)" if isinstance(value, DictConfig) else override_text(value)
