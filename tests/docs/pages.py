"""The Markdown pages of the documentation, as CommonMark reads them."""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from depthlm.locations import REPOSITORY


def page_names() -> list[str]:
    """Return the tracked pages, relative to the repository."""
    listed = ["git", "ls-files", "*.md", "docs/*.ipynb"]
    return subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()


@cache
def tokens(name: str) -> list[Token]:
    """Return the blocks of a page; of a notebook, those of its Markdown cells."""
    text = Path(REPOSITORY, name).read_text()
    if name.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return MarkdownIt().enable("table").parse(text)


def links(name: str) -> Iterator[str]:
    """Yield the target of each link and each image of a page."""
    for block in tokens(name):
        for token in block.children or ():
            if token.type in ("link_open", "image"):
                yield str(token.attrs["href" if token.type == "link_open" else "src"])


@cache
def anchors(name: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: list[str] = []
    for opening, inline in pairwise(tokens(name)):
        if opening.type == "heading_open":
            text = "".join(token.content for token in inline.children or ())
            anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return set(found)


def blocks(name: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [token.content for token in tokens(name) if token.type == "fence" and token.info == language]
