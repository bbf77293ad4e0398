"""Renders pages as GitHub does: anchors, lists, formulas without a script, notebooks, and the lines of docstrings."""

import html
import re
from pathlib import Path, PurePosixPath
from typing import Any

from griffe import Extension, Object
from latex2mathml.converter import convert
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ITEM = re.compile(r"( *)([-*]|\d+\.) +")
FENCE = re.compile(r" *(```|~~~)")
# `$$formula$$` is a block, and `$formula$` is part of a line
FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)
# latex2mathml makes a prime an exponent, although fonts draw it small and raised already
PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)(<mi>&#x02032;</mi>)</msup>")
# a line `name: meaning` or `a, b: meaning` of a docstring
MEANING = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")


def on_config(config: Any) -> None:
    config.mdx_configs["toc"]["slugify"] = github_slug


def github_slug(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).strip().lower()).replace(" ", separator)


def on_files(files: Any, config: Any) -> Any:
    """Add the page and the pictures of each notebook under docs/."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        place = PurePosixPath(file.src_uri)
        text, resources = MarkdownExporter().from_filename(str(Path(file.abs_src_path)))
        for name, picture in resources["outputs"].items():
            text = text.replace(f"]({name})", f"]({place.stem}/{name})")
            files.append(File.generated(config, str(place.parent / place.stem / name), content=picture))
        text += f"\n[Download this notebook]({place.name}).\n"
        files.append(File.generated(config, str(place.with_suffix(".md")), content=text))
    return files


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
    """Replace formulas by MathML, which browsers render by themselves. A picture links to its file."""
    content = FORMULA.sub(lambda match: mathml(html.unescape(match[2]).strip(), match[1] == "div"), content)
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', content)


def mathml(tex: str, is_block: bool) -> str:
    """Return a formula as MathML. A narrow screen breaks the line of a block at each \\qquad."""
    if not is_block:
        return PRIME.sub(r"\1\2", convert(tex, display="inline"))
    formulas = (PRIME.sub(r"\1\2", convert(part, display="block")) for part in tex.split(r"\qquad"))
    parts = "".join(f"<div>{formula}</div>" for formula in formulas)
    return f'<div class="formula">{parts}</div>'


class Meanings(Extension):
    """Makes a list of the lines `name: meaning` of each docstring, which Markdown would join to a paragraph."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(docstring: str) -> str:
    """Return a docstring whose lines `name: meaning` and `a, b: meaning` are items of lists."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        match = MEANING.fullmatch(line)
        # the text of a meaning continues in lines that are indented
        continues = inside and line.startswith("    ")
        if match:
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines += [*([] if inside else [""]), f"- {names}: {match[2]}"]
        elif inside and not continues:
            lines += ["", line]
        else:
            lines.append(line)
        inside = bool(match) or continues
    return "\n".join(lines)
