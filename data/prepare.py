"""Make the token files of a corpus: python data/prepare.py data=stdlib, or data=local data.source=my-text.

Takes the overrides of train.py and prepares what they would train on; does nothing where it is there and whole.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

# The package lies beside this folder, also where it is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from depthlm.config import compose
from depthlm.config.command_line import exit_on_mistake
from depthlm.data import Manifest, prepare, verify


def main() -> None:
    """Prepare, check the digests of every file, and print what lies where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    folder = prepare(compose(parser.parse_args().overrides).data)
    verify(folder)
    Console().print(table(folder, Manifest.read(folder)))


def table(folder: Path, manifest: Manifest) -> Table:
    """One row a split: its documents, bytes of text, tokens and files."""
    entropy = manifest.train.unigram_entropy or 0.0
    caption = f"{manifest.vocab_size:,} tokens of vocabulary, {manifest.dtype}; unigram entropy {entropy:.3f} nats"
    rows = Table(
        "split", "documents", "text MB", "tokens", "bytes a token", "files", title=str(folder), caption=caption
    )
    for name, split in manifest.splits().items():
        files = split.files[0].name if len(split.files) == 1 else f"{split.files[0].name} ... {split.files[-1].name}"
        numbers = f"{split.documents:,}", f"{split.bytes / 1e6:.1f}", f"{split.tokens:,}"
        rows.add_row(name, *numbers, f"{split.bytes / split.tokens:.2f}", files)
    return rows


if __name__ == "__main__":
    exit_on_mistake("prepare.py", main)
