"""Damaged copies of a file, drawn from a seed."""

import json
import random
from typing import Any

# values that replace others in JSON
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    float("inf"),
    "",
    "x" * 10000,
    "../../x",
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return a damaged copy."""
    data = bytearray(content)
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 4, 64, 4096)))
    kind = chance.choice(("bits", "bits", "cut", "remove", "insert", "repeat", "encoding", "value", "value", "nesting"))
    if kind == "bits":
        for _ in range(chance.choice((1, 1, 1, 8))):
            bit = chance.randrange(8 * max(1, len(data)))
            if data:
                data[bit // 8] ^= 1 << bit % 8
    elif kind == "cut":
        del data[at:]
    elif kind == "remove":
        del data[at:end]
    elif kind == "insert":
        data[at:at] = chance.randbytes(chance.choice((1, 3, 200)))
    elif kind == "repeat":
        data[at:at] = data[at:end] * chance.choice((1, 50))
    elif kind == "encoding":
        text = content.decode("utf-8", errors="replace")
        return text.encode(chance.choice(("utf-16", "utf-8-sig", "utf-32", "cp037")), errors="replace")
    elif kind == "nesting":
        deep = chance.choice((b"[", b'{"a":', b"- ", b"{a: ")) * chance.choice((50, 20000))
        data[at:end] = deep
    else:
        return with_another_value(content, chance)
    return bytes(data)


def with_another_value(content: bytes, chance: random.Random) -> bytes:
    """Return JSON, or a line of it, with one value replaced or removed; other content with a random byte."""
    lines = content.splitlines(keepends=True)
    whole = content[:1] in (b"{", b"[") and len(lines) != 1 and not content.startswith(b'{"step')
    number = 0 if whole or not lines else chance.randrange(len(lines))
    try:
        value = json.loads(content if whole else lines[number])
    except (ValueError, IndexError):
        return content + chance.randbytes(1)
    holders: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        pairs = list(one.items()) if isinstance(one, dict) else list(enumerate(one)) if isinstance(one, list) else []
        holders += [(one, key) for key, _ in pairs]
        waiting += [child for _, child in pairs]
    if holders:
        holder, key = chance.choice(holders)
        if isinstance(holder, dict) and chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = chance.choice(VALUES)
    changed = json.dumps(value).encode()
    return changed if whole else b"".join([*lines[:number], changed + b"\n", *lines[number + 1 :]])
