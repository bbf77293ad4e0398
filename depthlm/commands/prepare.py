"""Make the token files of a corpus: depthlm prepare data=fineweb_edu data.max_tokens=10B

Takes the overrides of train.py and prepares what they would train on; does nothing where they exist.
Killed at any moment, the same command resumes from the last complete file, and ends with the same bytes.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from depthlm.config import compose
from depthlm.console import stdout_console
from depthlm.data import Manifest, prepare, token_folders, verify
from depthlm.data.corpora.documents import REASONS


def main(arguments: list[str], program: str) -> None:
    """Prepare, or check the digests of every file; print what lies where."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--config-dir", help="a folder with configuration files of your own, as for train.py")
    parser.add_argument("--verify", action="store_true", help="prepare nothing; compare every file with its digest")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="one source of a mixture; repeatable"
    )
    given = parser.parse_intermixed_args(arguments)
    data = compose(given.overrides, given.config_dir).data
    folders = token_folders(data) if given.verify else prepare(data, only=given.only)
    folders = {name: folder for name, folder in folders.items() if not given.only or name in given.only}
    if given.verify:
        verify_all(list(folders.values()))
    console = stdout_console()
    console.print(table(folders))
    for folder in folders.values():
        console.print(notes(folder), soft_wrap=True)


def verify_all(folders: list[Path]) -> None:
    """Read every file of the folders. Raises DataError for the first that is not what its manifest says."""
    sizes = [file.stat().st_size for folder in folders if Manifest.exists(folder) for file in folder.iterdir()]
    columns = TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(sizes))
        for folder in folders:
            verify(folder, lambda read: bar.update(task, advance=read))
    console.print("every file is what its manifest says")


def table(folders: dict[str, Path]) -> Table:
    """One row a split of each source: its documents, bytes of text, tokens and files."""
    rows = Table("source", "split", "documents", "text MB", "tokens", "bytes a token", "files")
    for name, folder in folders.items():
        manifest = Manifest.read(folder)
        (held_out,) = manifest.validation.values()
        for kind, split in {"train": manifest.train, "validation": held_out}.items():
            if split.files:
                numbers = f"{split.documents:,}", f"{split.bytes / 1e6:.1f}", f"{split.tokens:,}"
                rows.add_row(name, kind, *numbers, f"{split.bytes / split.tokens:.2f}", str(len(split.files)))
    return rows


def notes(folder: Path) -> str:
    """Where a source lies, its vocabulary and entropy, and what was left out."""
    manifest = Manifest.read(folder)
    parts = [f"{manifest.vocab_size:,} tokens of vocabulary, {manifest.dtype}"]
    if manifest.train.unigram_entropy is not None:
        parts.append(f"unigram entropy {manifest.train.unigram_entropy:.3f} nats")
    parts += [f"left out {count:,} {REASONS[reason]}" for reason, count in manifest.left_out.items()]
    return f"{folder}: {'; '.join(parts)}"
