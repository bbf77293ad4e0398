"""Writes the tables of the page on the configuration: groups, settings of mechanisms and keys."""

import html
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import hydra
from hydra.utils import get_class

from depthlm.commands.help import default_text, describe_option, setting_rows
from depthlm.config.hydra_context import available_groups, hydra_at_conf
from depthlm.config.keys import Key, keys
from depthlm.config.validate.explain import option_file
from depthlm.files import read_yaml

PARTS = ("model/connection", "model/attention")
RESUME = {"free": "yes", "logged": "yes, logged", "fixed": "no"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "reference/configuration.md":
        return markdown
    with hydra_at_conf():
        raw = hydra.compose("config", return_hydra_config=True)
    for marker, lines in (
        ("<!-- groups -->", group_tables(raw.hydra.runtime.choices)),
        ("<!-- mechanisms -->", mechanism_tables()),
        ("<!-- keys -->", key_tables(raw)),
    ):
        if marker not in markdown:
            raise ValueError(f"{page.file.src_uri}: no line {marker}")
        markdown = markdown.replace(marker, "\n".join(lines))
    return markdown


def group_tables(chosen: Any) -> Iterator[str]:
    """Yield a table of the options of each group."""
    for group, options in available_groups(None).items():
        yield f"\n### `{group}`\n"
        default = chosen.get(group)
        ordered = sorted(options, key=lambda option: option != default)
        rows = ((code(option), prose(describe_option(group, option, None))) for option in ordered)
        yield f"The default is `{default}`.\n" if default in options else "No option is the default.\n"
        yield from table(("option", "what it is"), rows)


def mechanism_tables() -> Iterator[str]:
    """Yield a table of the settings of each connection and attention that has any."""
    for group in PARTS:
        name = group.replace("/", ".")
        for option in available_groups(None)[group]:
            settings = read_yaml(option_file(group, option, None))
            rows = [
                (code(key), code(value), prose(meaning))
                for key, value, _, meaning in setting_rows(name, get_class(settings["_target_"]), settings)
            ]
            if rows:
                yield f"\n### `{group}={option}`\n"
                yield from table(("key", "value", "meaning"), rows)


def key_tables(raw: Any) -> Iterator[str]:
    """Yield a table of the keys of each section."""
    for section, members in groupby(keys().values(), lambda key: key.name.rpartition(".")[0]):
        yield f"\n### {f'Keys of `{section}`' if section else 'Keys without a group'}\n"
        yield from table(
            ("key", "default", "allowed", "resume with another value", "meaning"), (row(key, raw) for key in members)
        )


def row(key: Key, raw: Any) -> tuple[str, ...]:
    return (
        code(key.name),
        code(default_text(raw, key.name)),
        key.wanted,
        RESUME[key.metadata["on_resume"]],
        prose(key.doc),
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"
    yield ""


def prose(text: str) -> str:
    """Return text in which Markdown sees no markup."""
    return re.sub(r"([*_\[])", r"\\\1", html.escape(text, quote=False))


def code(text: str) -> str:
    return f"`{text}`" if text else ""
