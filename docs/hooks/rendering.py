"""Renders as GitHub does what Python-Markdown renders in another way: anchors, lists, and formulas without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

ITEM = re.compile(r"( *)([-*]|\d+\.) +")
FENCE = re.compile(r" *(```|~~~)")
FORMULA = re.compile(r'<div class="arithmatex">(.*?)</div>', re.DOTALL)


def on_config(config: Any) -> None:
    config.mdx_configs["toc"]["slugify"] = github_slug


def github_slug(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).strip().lower()).replace(" ", separator)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Indent what belongs to an item of a list by four columns, and put an empty line before each list.

    GitHub needs the columns of the item's marker, and no empty line.
    """
    lines: list[str] = []
    # the columns where the text of each open item begins
    columns: list[int] = []
    is_code = False
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip())
        item = None if is_code else ITEM.match(line)
        after_blank = not lines or not lines[-1].strip()
        if line.strip() and not is_code and (item or after_blank or FENCE.match(line)):
            # a line of text below a line of text belongs to its paragraph, whatever its indentation
            columns = [column for column in columns if column <= indent]
        depth = len([column for column in columns if column <= indent])
        if item and not depth and not after_blank and not ITEM.match(lines[-1]) and not is_open(lines):
            lines.append("")
        lines.append(" " * (4 * depth + indent - (columns[depth - 1] if depth else 0)) + line.lstrip())
        if item:
            columns.append(len(item[0]))
        is_code ^= bool(FENCE.match(line))
    return "\n".join(lines)


def is_open(lines: list[str]) -> bool:
    """Return whether the last paragraph belongs to a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False


def on_page_content(content: str, **_: Any) -> str:
    """Replace formulas by MathML, which browsers render by themselves."""
    return FORMULA.sub(lambda match: f'<div class="formula">{math(match[1])}</div>', content)


def math(tex: str) -> str:
    stripped = html.unescape(tex).strip().removeprefix(r"\[").removesuffix(r"\]")
    return str(convert(stripped, display="block"))
