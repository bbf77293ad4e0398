"""Lets links of the pages lead to the site's pages of README.md and others outside of docs/, and to the repository."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from rendering import github_slug

REPOSITORY = Path(__file__).parents[2]
# Markdown outside of docs/ that has a place in the navigation
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
# code in docs/, which mkdocs.yml excludes
EXCLUDED = "docs/results/analysis/"
FENCE = re.compile(r"^ *(```|~~~)")
# the text of a link if it is the name of a page, and the target
LINK = re.compile(r"(\[[\w./-]+\.md)?\]\(([^)\s]+)\)")
# a link to a file without a page, and its text
FILE = re.compile(r'<a href="file:([^"]*)">(.*?)</a>', re.DOTALL)
API = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of PAGES."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(REPOSITORY / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links to pages of the repository to pages of the site, with titles in place of names of files.

    Comments `api:` become directives of mkdocstrings.
    """
    here = page.file.src_uri

    def changed(match: re.Match[str]) -> str:
        _, hash_mark, anchor = match[2].partition("#")
        target = target_of(match[2], here)
        if target is None:
            return match[0]
        if is_source(target):
            return f"{match[1] or ''}](file:{target})"
        text = f"[{heading(target, anchor)}" if match[1] else ""
        return f"{text}]({posixpath.relpath(uri_of(target), posixpath.dirname(here) or '.')}{hash_mark}{anchor})"

    lines = [line if is_code else LINK.sub(changed, line) for line, is_code in marked_lines(markdown)]
    return API.sub(r"::: \1", "\n".join(lines))


def on_page_content(content: str, config: Any, **_: Any) -> str:
    """Let links to files lead to the repository's address; they are plain text where it has none."""
    address = f"{config.repo_url.rstrip('/')}/blob/main/" if config.repo_url else ""
    return FILE.sub(lambda match: f'<a href="{address}{match[1]}">{match[2]}</a>' if address else match[2], content)


def marked_lines(markdown: str) -> list[tuple[str, bool]]:
    """Return each line, and whether it belongs to a block of code."""
    lines, inside = [], False
    for line in markdown.split("\n"):
        fence = bool(FENCE.match(line))
        lines.append((line, inside or fence))
        inside ^= fence
    return lines


def heading(target: str, anchor: str) -> str:
    """Return the heading that a link to a page of the repository leads to: its title, or that of the anchor."""
    lines = marked_lines((REPOSITORY / target).read_text())
    headings = [line.lstrip("#").strip() for line, is_code in lines if line.startswith("#") and not is_code]
    return next((text for text in headings if github_slug(text) == anchor), headings[0])


def target_of(link: str, here: str) -> str | None:
    """Return the path in the repository that a link of a page points to, or None for another site or the same page."""
    path = link.partition("#")[0]
    if not path or re.match(r"\w+:", path):
        return None
    real = {uri: name for name, uri in PAGES.items()}.get(here, f"docs/{here}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(real), path))


def is_source(target: str) -> bool:
    """Return whether the site has no page for a path of the repository."""
    is_page = target.startswith("docs/") and not target.startswith(EXCLUDED) and not (REPOSITORY / target).is_dir()
    return (REPOSITORY / target).exists() and not is_page and target not in PAGES


def uri_of(target: str) -> str:
    """Return where the site has the page of a path of the repository."""
    return PAGES.get(target) or re.sub(r"\.ipynb$", ".md", target.removeprefix("docs/"))
