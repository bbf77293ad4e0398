"""Adds to the site what its pages link to outside of docs/: pages for Markdown, code and folders.

So every link works on the site as it does in the repository, also where the repository has no public address.
"""

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
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".toml": "toml",
    ".sh": "sh",
    ".sbatch": "sh",
    ".cff": "yaml",
    ".Dockerfile": "docker",
    "": "text",
}
FENCE = re.compile(r"^ *(```|~~~)")
# the text of a link if it is the name of a page, and the target
LINK = re.compile(r"(\[[\w./-]+\.md)?\]\(([^)\s]+)\)")
API = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)
HEAD = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of PAGES, and a page for each file and folder that a page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(REPOSITORY / path).read_text()))
    sources = {
        target
        for file in files.documentation_pages()
        for link in links(file.content_string)
        if (target := target_of(link, file.src_uri)) is not None and is_source(target)
    }
    for target in sorted(sources):
        add_source(files, config, target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links to files of the repository to their pages, with titles in place of names of files.

    Comments `api:` become directives of mkdocstrings.
    """
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def changed(match: re.Match[str]) -> str:
        _, hash_mark, anchor = match[2].partition("#")
        target = target_of(match[2], here)
        if target is None:
            return match[0]
        text = f"[{heading(target, anchor)}" if match[1] else ""
        return f"{text}]({posixpath.relpath(uri_of(target), posixpath.dirname(here) or '.')}{hash_mark}{anchor})"

    lines = [line if is_code else LINK.sub(changed, line) for line, is_code in marked_lines(markdown)]
    return API.sub(r"::: \1", "\n".join(lines))


def add_source(files: Any, config: Any, target: str) -> None:
    """Add the page of a file or a folder, or a copy of a file of data."""
    path, uri = REPOSITORY / target, uri_of(target)
    if path.is_dir():
        names = sorted(
            f"- `{child.name}{'/' if child.is_dir() else ''}`" for child in path.iterdir() if child.name[0] not in "._"
        )
        text = f"{HEAD}# {target}\n\nThis folder of the repository contains:\n\n" + "\n".join(names) + "\n"
    elif path.suffix in LANGUAGES:
        code = path.read_text()
        text = f"{HEAD}# {target}\n\n~~~~~{LANGUAGES[path.suffix]}\n{code}~~~~~\n"
    else:
        files.append(File.generated(config, uri, abs_src_path=str(path)))
        return
    files.append(File.generated(config, uri, content=text))


def marked_lines(markdown: str) -> list[tuple[str, bool]]:
    """Return each line, and whether it belongs to a block of code."""
    lines, inside = [], False
    for line in markdown.split("\n"):
        fence = bool(FENCE.match(line))
        lines.append((line, inside or fence))
        inside ^= fence
    return lines


def links(markdown: str) -> list[str]:
    return [link for line, is_code in marked_lines(markdown) if not is_code for _, link in LINK.findall(line)]


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
    """Return whether the site has no page for a path of the repository, other than one of `add_source`."""
    is_page = target.startswith("docs/") and not target.startswith(EXCLUDED) and not (REPOSITORY / target).is_dir()
    return (REPOSITORY / target).exists() and not is_page and target not in PAGES


def uri_of(target: str) -> str:
    """Return where the site has the page of a path of the repository."""
    if target in PAGES:
        return PAGES[target]
    if not is_source(target):
        return re.sub(r"\.ipynb$", ".md", target.removeprefix("docs/"))
    is_page = (REPOSITORY / target).is_dir() or Path(target).suffix in LANGUAGES
    return f"source/{target}.md" if is_page else f"source/{target}"
