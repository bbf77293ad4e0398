"""How far a preparation is: the file from which the next call goes on, and what a person sees meanwhile."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from depthlm.data.corpora.sources import TextFiles
from depthlm.data.preparation.split_writer import SplitWriter
from depthlm.files import replace_text

FILE_NAME = "progress.json"

# Seconds between lines where there is no terminal.
LINE_EVERY = 30.0


class Position(NamedTuple):
    """Where to read on: the part of the source, the file of that part, and the record of that file, from 0."""

    part: int
    file: int
    record: int


class ProgressFile:
    """progress.json of a folder in preparation, written whenever a shard has become whole.

    It belongs to these settings, this state of the source and this tokenizer; for others it does not count.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], files: TextFiles, tokenizer: str) -> None:
        self.file = folder / FILE_NAME
        self.key = {"settings": settings, "source": files.description, "state": files.state, "tokenizer": tokenizer}

    def save(self, position: Position, writers: dict[bool, SplitWriter], left_out: Counter[str]) -> None:
        """Write down that everything before the position is on the disk."""
        states = {writer.stem: writer.state() for writer in writers.values()}
        text = json.dumps(self.key | {"position": position, "writers": states, "left_out": left_out})
        replace_text(self.file, text)

    def restore(self, writers: dict[bool, SplitWriter], left_out: Counter[str]) -> Position | None:
        """Bring writers and counts to where the file says; None, and nothing changed, where there is none that fits."""
        found = read(self.file.parent)
        if found is None or any(found[name] != value for name, value in self.key.items()):
            return None
        for writer in writers.values():
            writer.restore(found["writers"][writer.stem])
        left_out.update(found["left_out"])
        return Position(*found["position"])


def read(folder: Path) -> dict[str, Any] | None:
    """What the folder's progress file says; None where there is none, or not all that it tells of is there."""
    try:
        found = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        sizes = {name: size for state in found["writers"].values() for name, size in state["sizes"].items()}
        whole = all((folder / name).stat().st_size >= size for name, size in sizes.items())
        return found if whole and (folder / "tokenizer.json").is_file() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


@contextmanager
def training_bar(
    console: Console, vocab_size: int, total_bytes: int
) -> Iterator[Callable[[Iterable[str]], Iterator[str]]]:
    """A bar while a tokenizer is trained: over the text that it reads, then over the time that its merges take.

    The block is given what counts the texts that go through it.
    """
    words = f"training a tokenizer of {vocab_size:,} tokens"
    if not console.is_terminal:
        console.print(words)
    columns = TextColumn(words), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn()
    hidden = console.quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("", total=total_bytes, doing="reading")

        def reading(texts: Iterable[str]) -> Iterator[str]:
            for text in texts:
                bar.advance(task, len(text))
                yield text
            bar.update(task, total=None, doing="finding merges")

        yield reading


class ProgressBar:
    """MB/s of text, tokens and the time that remains: a bar on a terminal, now and then a line elsewhere.

    quota: the training tokens wanted; null: all that the source has.
    """

    def __init__(self, console: Console, name: str, quota: int | None) -> None:
        self.console, self.name, self.quota = console, name, quota
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rate]:.1f} MB/s"),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)
        self._task = self._bar.add_task(f"tokenising {name}", total=1.0, rate=0.0, tokens=0)
        self._started: tuple[float, int, float] | None = None
        self._line_at = time.monotonic() + LINE_EVERY

    def show(self, read: float, writers: dict[bool, SplitWriter]) -> None:
        """read: the share of the source that has been read."""
        now, done_bytes = time.monotonic(), sum(writer.bytes for writer in writers.values())
        tokens = sum(writer.tokens for writer in writers.values())
        done = max(read, writers[False].tokens / self.quota) if self.quota else read
        if self._started is None:
            self._started = now, done_bytes, done
        since, bytes_before, done_before = self._started
        rate = (done_bytes - bytes_before) / max(now - since, 1e-9) / 1e6
        self._bar.update(self._task, completed=min(done, 1.0), rate=rate, tokens=tokens)
        if not self.console.is_terminal and now >= self._line_at:
            self._line_at = now + LINE_EVERY
            remaining = (now - since) / max(done - done_before, 1e-9) * (1 - min(done, 1.0))
            self.console.print(
                f"tokenising {self.name}: {100 * min(done, 1.0):.1f}%, {rate:.1f} MB/s, {tokens:,} tokens, "
                f"about {remaining / 60:.0f} minutes left"
            )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
