"""A corpus prepared in parts, by several processes, has the bytes that one process would have written."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from depthlm.commands.prepare import main
from depthlm.data import prepare, token_folders
from depthlm.data.corpora.documents import Reader
from depthlm.data.preparation import parts
from depthlm.data.preparation.parts import Part

from .preparing import content, left_over


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches a file, and documents in several pieces."""
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 100)
    monkeypatch.setattr("depthlm.data.preparation.encode.LONGEST", 150)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(("count", "max_tokens"), [(2, None), (7, 700), (7, 5)])
def test_parts_in_any_order_give_the_bytes_of_one_process(local, count, max_tokens):
    whole = content(prepare(local(path="whole", shard_tokens=500, max_tokens=max_tokens))["local"])
    data = local(shard_tokens=500, max_tokens=max_tokens)
    folder = token_folders(data)["local"]
    numbers = random.Random(count).sample(range(count), count)
    for number in numbers:
        # a few files are enough for the smallest number of tokens
        assert max_tokens == 5 or not folder.exists()
        prepare(data, part=Part(number, count))
    assert content(folder) == whole
    assert left_over(folder) <= {"whole"}


@pytest.mark.usefixtures("small_batches")
def test_a_part_that_was_killed_resumes_from_its_last_mark(local, text_folder, monkeypatch):
    monkeypatch.setattr("depthlm.data.preparation.parts.MARK_EVERY", 0.0)
    lines = "".join(f'{{"text": "{" ".join(["one", "two", "Ω"] * (k % 40))}"}}\n' for k in range(200))
    for file in list(text_folder.rglob("*.txt")):
        file.unlink()
    for number in range(3):
        (text_folder / f"{number}.jsonl").write_text(lines + "not json\n" * number)
    settings = {
        "suffixes": [".jsonl"],
        "text_field": "text",
        "tokenizer": "bytes",
        "shard_tokens": 500,
        "on_bad_document": "skip",
    }
    whole = content(prepare(local(path="whole", **settings))["local"])
    data = local(**settings)
    folder = token_folders(data)["local"]
    syncs, sync = iter(range(100)), parts._sync

    def killed(file: IO[bytes]) -> None:
        if next(syncs) == 20:
            # what a mark does not cover may be anything after a power cut
            file.write(bytes(1000))
            raise KeyboardInterrupt
        sync(file)

    monkeypatch.setattr(parts, "_sync", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, part=Part(0, 2))
    monkeypatch.setattr(parts, "_sync", sync)
    first: list[int] = []
    records = Reader.records
    monkeypatch.setattr(
        Reader, "records", lambda self, *arguments: first.extend(arguments) or records(self, *arguments)
    )
    prepare(data, part=Part(1, 2))
    assert not folder.exists()
    prepare(data, part=Part(0, 2))
    assert max(first) > 0
    assert content(folder) == whole


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def change_number(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"size": ', '"size": 1', 1))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an id": lambda path: flip(path, -40),
    "a length": lambda path: flip(path, 1),
    "a huge length": lambda path: flip(path, 6, 6),
    "the digest": lambda path: flip(path, -1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 5),
    "lost": lambda path: path.unlink(),
    "a summary cut": lambda path: os.truncate(path.with_suffix(".json"), 20),
    "a number in a summary": lambda path: change_number(path.with_suffix(".json")),
}


@pytest.mark.usefixtures("small_batches")
def test_damaged_files_of_a_part_are_encoded_again_which_is_printed(local, capsys):
    whole = content(prepare(local(path="whole", shard_tokens=500))["local"])
    data = local(path="tokens", shard_tokens=500)
    prepare(data, part=Part(0, 2))
    encoded = sorted(Path("tokens.partial").glob("encoded-*/*.batches"))[7:]
    damaged = dict(zip(encoded, DAMAGES, strict=False))
    assert len(damaged) == len(DAMAGES)
    for file, damage in damaged.items():
        DAMAGES[damage](file)
    prepare(data, part=Part(1, 2))
    # a damaged summary counts as missing, and only its own part or a process for all encodes the file
    assert content(prepare(data)["local"]) == whole
    printed = capsys.readouterr().err.replace("\n", "")
    assert [damage for file, damage in damaged.items() if f"{file.name} " not in printed] == []
    assert left_over(Path("tokens")) <= {"whole", "text"}


def test_parts_at_the_same_time(local, text_folder, forks):
    whole = content(prepare(local(path="whole"))["local"])
    code = (
        "import sys; from depthlm.config.schema import Data; from depthlm.data import prepare\n"
        "from depthlm.data.preparation.parts import Part\n"
        "prepare(Data(name='local', source=sys.argv[1], vocab_size=300, validation_fraction=0.2), "
        "part=Part(int(sys.argv[2]), 2))"
    )
    # one of them twice, as a requeued job might run beside the one that it replaces
    processes = [forks.start(["-c", code, text_folder, str(n)], cwd=Path.cwd()) for n in (0, 1, 1)]
    outputs = [process.communicate(120)[0] for process in processes]
    assert [process.wait() for process in processes] == [0] * 3, outputs
    assert content(token_folders(local())["local"]) == whole


def test_a_part_that_does_not_exist_is_refused(capsys):
    for text in ("3/3", "1", "-1/2"):
        with pytest.raises(SystemExit) as ended:
            main([f"--part={text}"], "prepare.py")
        assert ended.value.code == 2
        assert "must be I/N with I from 0 to N - 1" in capsys.readouterr().err
