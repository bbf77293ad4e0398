"""Links of the pages as Markdown: files exist, and so do the headings that anchors name."""

import posixpath
import re
from pathlib import Path

from depthlm.locations import REPOSITORY

from .pages import anchors, links, page_names


def fault(name: str, link: str) -> str | None:
    """Return what is wrong with a link of a page."""
    if re.match(r"[a-z]+:", link):
        return None
    path, _, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
    if not Path(REPOSITORY, target).exists():
        return "no such file"
    known = not anchor or (target.endswith(".md") and anchor in anchors(target))
    return None if known else "no such heading"


def test_links_lead_to_files_and_headings():
    found = [(name, link, fault(name, link)) for name in page_names() for link in links(name)]
    assert not [each for each in found if each[2]]
