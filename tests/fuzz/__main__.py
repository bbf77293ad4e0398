"""Damage each file that a command reads, and look for anything but a clear error or the right answer.

    python -m tests.fuzz [--mutations 2000] [--commands 200] [--seed 0] [--only config.yaml manifest.json]

A mutation flips bits, cuts, inserts, repeats or re-encodes bytes, or replaces a value of JSON or YAML by a value of
another type or a deeply nested value. The readers run in this process, each command in a new process. A reader may
return, or raise a UserError; a command may exit with 0 or 2, or with 1 and no traceback. Where a file is covered by a
digest, what a reader returns must also equal what it returns for the original. Each case has a time limit.
"""

import argparse
import contextlib
import io
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import track

from depthlm.errors import UserError
from depthlm.locations import REPOSITORY

from .targets import Target, make_targets

READER_SECONDS, COMMAND_SECONDS = 20, 120
# values that replace others in JSON
VALUES: list[Any] = [None, True, -1, 0, 2**70, 1.5, float("inf"), "", "x" * 10000, "../../x", "\ud800", [], {}, [[]],
                     {"a": 1}]  # fmt: skip


class HangError(Exception):
    """A case took longer than its limit."""


@dataclass
class Outcome:
    """What the mutations of a file led to. failures: the seeds of those that fail, with the end of their tracebacks."""

    refused: int = 0
    returned: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return a damaged copy."""
    data = bytearray(content)
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 4, 64, 4096)))
    kinds = ("bits", "bits", "cut", "remove", "insert", "repeat", "encoding", "value", "value", "nesting")
    damage = chance.choice(kinds)
    if damage == "bits":
        for _ in range(chance.choice((1, 1, 1, 8))):
            bit = chance.randrange(8 * max(1, len(data)))
            if data:
                data[bit // 8] ^= 1 << bit % 8
    elif damage == "cut":
        del data[at:]
    elif damage == "remove":
        del data[at:end]
    elif damage == "insert":
        data[at:at] = chance.randbytes(chance.choice((1, 3, 200)))
    elif damage == "repeat":
        data[at:at] = data[at:end] * chance.choice((1, 50))
    elif damage == "encoding":
        text = content.decode("utf-8", errors="replace")
        return text.encode(chance.choice(("utf-16", "utf-8-sig", "utf-32", "cp037")), errors="replace")
    elif damage == "nesting":
        data[at:end] = chance.choice((b"[", b'{"a":', b"- ", b"{a: ")) * chance.choice((50, 20000))
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
        holder = waiting.pop()
        if isinstance(holder, dict | list):
            pairs: list[Any] = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
            holders += [(holder, key) for key, _ in pairs]
            waiting += [child for _, child in pairs]
    if holders:
        holder, key = chance.choice(holders)
        if isinstance(holder, dict) and chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = chance.choice(VALUES)
    changed = json.dumps(value).encode()
    return changed if whole else b"".join([*lines[:number], changed + b"\n", *lines[number + 1 :]])


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise HangError if the block takes longer."""

    def stop(*_: object) -> None:
        raise HangError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz_reader(target: Target, mutations: int, seed: int) -> Outcome:
    """Read mutations of a file. The file is restored in the end."""
    original, outcome = target.file.read_bytes(), Outcome()
    expected = target.read(target.file) if target.exact else None
    try:
        for number in range(mutations):
            case = f"{target.name}:{seed}:{number}"
            target.file.write_bytes(mutated(original, random.Random(case)))
            try:
                with limited(READER_SECONDS):
                    answer = target.read(target.file)
                if target.exact and answer != expected:
                    outcome.failures[case] = "another answer"
                outcome.returned += 1
            except UserError:
                outcome.refused += 1
            except Exception:
                outcome.failures[case] = "\n".join(line[:200] for line in traceback.format_exc().splitlines()[-6:])
    finally:
        target.file.write_bytes(original)
    return outcome


def fuzz_commands(targets: list[Target], count: int, seed: int) -> Outcome:
    """Run commands on mutations of their files."""
    outcome = Outcome()
    pairs = [(target, command) for target in targets for command in target.commands]
    for number in track(range(count), description="commands"):
        target, command = pairs[number % len(pairs)]
        case, original = f"{' '.join(command)} on {target.name}:{seed}:{number}", target.file.read_bytes()
        target.file.write_bytes(mutated(original, random.Random(case)))
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=COMMAND_SECONDS
            )
            if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr:
                outcome.failures[case] = f"exit code {done.returncode}: {done.stderr[-600:]}"
            outcome.returned += done.returncode == 0
            outcome.refused += done.returncode != 0
        except subprocess.TimeoutExpired:
            outcome.failures[case] = f"longer than {COMMAND_SECONDS} s"
        finally:
            target.file.write_bytes(original)
    return outcome


@contextmanager
def quiet() -> Iterator[None]:
    """Log and print nothing: damaged files lead to a warning each."""
    log = logging.getLogger("depthlm")
    log.addFilter(drop := lambda _: False)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        log.removeFilter(drop)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=2000, help="of each file, through its reader")
    parser.add_argument("--commands", type=int, default=200, help="runs of commands in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        with quiet():
            targets = make_targets(Path(temporary))
        targets = [target for target in targets if not options.only or target.name in options.only]
        outcomes = {}
        for target in track(targets, description="files"):
            with quiet():
                outcomes[target.name] = fuzz_reader(target, options.mutations, options.seed)
        if options.commands:
            outcomes["commands"] = fuzz_commands(targets, options.commands, options.seed)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.refused:,} refused, {outcome.returned:,} read, {len(outcome.failures)} failures")
    failures = {case: text for outcome in outcomes.values() for case, text in outcome.failures.items()}
    for case, text in list(failures.items())[:20]:
        print(f"\n{case}\n{text}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
