"""Renders as GitHub does what Python-Markdown renders in another way: anchors, and formulas without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<div class="arithmatex">(.*?)</div>', re.DOTALL)


def on_config(config: Any) -> None:
    config.mdx_configs["toc"]["slugify"] = github_slug


def github_slug(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).strip().lower()).replace(" ", separator)


def on_page_content(content: str, **_: Any) -> str:
    """Replace formulas by MathML, which browsers render by themselves."""
    return FORMULA.sub(lambda match: f'<div class="formula">{math(match[1])}</div>', content)


def math(tex: str) -> str:
    stripped = html.unescape(tex).strip().removeprefix(r"\[").removesuffix(r"\]")
    return str(convert(stripped, display="block"))
