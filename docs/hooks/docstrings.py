"""Makes a list of the lines `name: meaning` of a docstring, which Markdown would join to a paragraph."""

import re
from typing import Any

from griffe import Extension, Object

MEANING = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")


class Meanings(Extension):
    """Changes the docstrings of all objects."""

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
