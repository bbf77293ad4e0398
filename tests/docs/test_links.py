"""Links of the pages as Markdown: files exist, and so do the headings that anchors name."""

import posixpath
import re
from pathlib import Path

import pytest

from depthlm.locations import REPOSITORY

from .pages import anchors, links, page_names


@pytest.mark.parametrize("name", page_names())
def test_links_lead_to_files_and_headings(name: str) -> None:
    broken = []
    for link in links(name):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        if not Path(REPOSITORY, target).exists():
            broken.append(f"{link}: no such file")
        elif anchor and not (target.endswith(".md") and anchor in anchors(target)):
            broken.append(f"{link}: no such heading")
    assert not broken
