"""Prepare the token files of a corpus: depthlm prepare data=fineweb_edu data.max_tokens=10B

Takes the overrides of train.py and prepares the data they would train on, unless the token files already exist.
After an interruption, the same command resumes from the last complete file and gives identical files.

With --import-tokens, it makes a folder of token files from ids that were tokenized elsewhere:
depthlm prepare --import-tokens part-*.npy --dtype uint32 --tokenizer dolma2/tokenizer.json --to data/tokens/c4
"""

import argparse
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from depthlm.config import ConfigError, compose
from depthlm.config.validate.machine import check_text
from depthlm.console import stderr_console, stdout_console
from depthlm.data import Manifest, prepare, token_folders, verify
from depthlm.data.corpora.documents import REASONS
from depthlm.data.preparation.imported import DTYPES, Import, import_tokens
from depthlm.data.preparation.prepare import check_only
from depthlm.data.tokenizers import load_tokenizer


def main(arguments: list[str], program: str) -> None:
    """Prepare the token files, or verify the hash of each; then print the folders and their contents."""
    options = read_options(arguments, program)
    if options.import_tokens:
        return import_ids(options)
    config = compose(options.overrides, options.config_dir, here="data")
    data = config.data
    check_only(data, options.only)
    # before hours of preparation
    if not options.verify and (errors := check_text(config, options.only)):
        raise ConfigError(errors)
    folders = token_folders(data) if options.verify else prepare(data, only=options.only)
    folders = {name: folder for name, folder in folders.items() if not options.only or name in options.only}
    if options.verify:
        verify_all(list(folders.values()))
    console = stdout_console()
    if folders:
        console.print(table(folders))
    for folder in folders.values():
        console.print(notes(folder), soft_wrap=True)


def read_options(arguments: list[str], program: str) -> argparse.Namespace:
    """Return the arguments of the command. Raises SystemExit with code 2 for those that it does not take."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--config-dir", help="a folder of additional configuration files, as for train.py")
    parser.add_argument("--verify", action="store_true", help="prepare nothing; verify the hash of every file")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="one source of a mixture; repeatable"
    )
    ids = parser.add_argument_group("ids that were tokenized elsewhere")
    ids.add_argument(
        "--import-tokens", nargs="+", type=Path, default=[], metavar="FILE",
        help="files of ids, flat and little-endian, with or without the header of .npy; documents end with the end of "
        "text, and may continue in the next file",
    )  # fmt: skip
    ids.add_argument("--dtype", choices=DTYPES, help="of the ids in files without a header")
    ids.add_argument("--tokenizer", help="that made the ids: bytes, a tokenizer.json or a model of the hub")
    ids.add_argument("--end-of-text", metavar="TOKEN", help="as data.end_of_text")
    ids.add_argument("--to", type=Path, metavar="FOLDER", help="folder of the token files, to be named by a `path`")
    ids.add_argument(
        "--held-out", type=parse_share, metavar="SHARE",
        help="share of the documents for validation, chosen by a hash of their ids; 1 (default): a validation set; "
        "below 1: text to train on",
    )  # fmt: skip
    options = parser.parse_intermixed_args(arguments)
    if options.import_tokens:
        if options.overrides or not options.tokenizer or not options.to:
            parser.error("--import-tokens needs --tokenizer and --to, and takes no overrides")
        if options.verify or options.only or options.config_dir:
            parser.error("--verify, --only and --config-dir are for a corpus; leave them out of --import-tokens")
    elif options.tokenizer or options.to or options.dtype or options.end_of_text or options.held_out:
        parser.error("--tokenizer, --to, --dtype, --end-of-text and --held-out need --import-tokens")
    return options


def import_ids(options: argparse.Namespace) -> None:
    """Make a folder of token files from ids, and print what it contains."""
    tokenizer = load_tokenizer(options.tokenizer, options.end_of_text)
    stderr_console().print(
        f"end of text: {tokenizer.end.token!r} (id {tokenizer.end.id}), by {tokenizer.end.source}", markup=False
    )
    # an import into the working directory replaces it, so that `.` would no longer be found
    folder = options.to.resolve()
    held_out = 1.0 if options.held_out is None else options.held_out
    manifest = import_tokens(Import(options.import_tokens, options.dtype, tokenizer, folder, held_out))
    console = stdout_console()
    console.print(table({manifest.name: folder}))
    console.print(notes(folder), soft_wrap=True)


def parse_share(text: str) -> float:
    """Return a share above 0 and at most 1. Raises ArgumentTypeError for other text."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0 and at most 1")
    return share


def verify_all(folders: list[Path]) -> None:
    """Verify every file of the folders. Raises DataError for the first file that does not match its manifest."""
    sizes = [file.stat().st_size for folder in folders if Manifest.exists(folder) for file in folder.iterdir()]
    columns = TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    console = stderr_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(sizes))
        for folder in folders:
            verify(folder, lambda read: bar.update(task, advance=read))
    console.print("every file matches its manifest")


def table(folders: dict[str, Path]) -> Table:
    """Return a table with one row per source and split: documents, bytes of text, tokens and files."""
    rows = Table("source", "split", "documents", "text MB", "tokens", "bytes/token", "files")
    for name, folder in folders.items():
        manifest = Manifest.read(folder)
        (held_out,) = manifest.validation.values()
        for split_name, split in {"train": manifest.train, "validation": held_out}.items():
            if split.files:
                numbers = f"{split.documents:,}", f"{split.bytes / 1e6:.1f}", f"{split.tokens:,}"
                rows.add_row(name, split_name, *numbers, f"{split.bytes / split.tokens:.2f}", str(len(split.files)))
    return rows


def notes(folder: Path) -> str:
    """Return the folder of a source, its vocabulary and entropy, and the number of skipped documents."""
    manifest = Manifest.read(folder)
    facts = [f"vocabulary of {manifest.vocab_size:,} tokens, {manifest.dtype}"]
    if manifest.train.unigram_entropy is not None:
        facts.append(f"unigram entropy {manifest.train.unigram_entropy:.3f} nats")
    facts += [f"skipped {count:,} {REASONS[reason]}" for reason, count in manifest.left_out.items()]
    return f"{folder}: {'; '.join(facts)}"
