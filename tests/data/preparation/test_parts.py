"""A corpus prepared in parts, by several processes, has the bytes that one process would have written."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from depthlm.commands.prepare import main
from depthlm.config.schema import Data
from depthlm.data import prepare, token_folders
from depthlm.data.preparation.parts import Part

from .preparing import content, left_over

Local = Callable[..., Data]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches a file, and documents in several pieces."""
    monkeypatch.setattr("depthlm.data.preparation.encode.BATCH", 100)
    monkeypatch.setattr("depthlm.data.preparation.encode.LONGEST", 150)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("max_tokens", [None, 700, 5])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_parts_in_any_order_give_the_bytes_of_one_process(local: Local, count: int, max_tokens: int | None) -> None:
    whole = content(prepare(local(path="whole", shard_tokens=500, max_tokens=max_tokens))["local"])
    data = local(shard_tokens=500, max_tokens=max_tokens)
    folder = token_folders(data)["local"]
    numbers = random.Random(count).sample(range(count), count)
    for number in numbers:
        assert not folder.exists()
        prepare(data, part=Part(number, count))
    assert content(folder) == whole
    assert left_over(folder) <= {"whole"}


@pytest.mark.usefixtures("small_batches")
def test_parts_do_not_encode_files_beyond_the_quota(local: Local, capsys: pytest.CaptureFixture[str]) -> None:
    data = local(max_tokens=700)
    for number in range(3):
        prepare(data, part=Part(number, 3))
    output = capsys.readouterr().err
    encoded = [int(line.split()[4]) for line in output.splitlines() if line.startswith("part ")]
    assert len(encoded) == 3
    # of 60
    assert 5 < sum(encoded) < 40


@pytest.mark.usefixtures("small_batches")
def test_a_part_that_was_killed_within_a_batch_resumes(local: Local, text_folder: Path) -> None:
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
    prepare(data, part=Part(0, 2))
    stored = folder.with_name(f"{folder.name}.partial") / "encoded"
    chance = random.Random(0)
    for file in sorted(stored.glob("*.npy")):
        file.with_suffix(".json").unlink()
        kept = chance.randrange(file.stat().st_size)
        with file.open("r+b") as cut:
            cut.truncate(kept)
    prepare(data, part=Part(1, 2))
    assert not folder.exists()
    prepare(data, part=Part(0, 2))
    assert content(folder) == whole


@pytest.mark.usefixtures("small_batches")
def test_one_process_that_prepares_everything_needs_no_part(local: Local) -> None:
    whole = content(prepare(local(path="whole"))["local"])
    data = local()
    prepare(data, part=Part(1, 2))
    assert content(prepare(data)["local"]) == whole


def test_parts_at_the_same_time(local: Local, text_folder: Path) -> None:
    whole = content(prepare(local(path="whole"))["local"])
    code = (
        "import sys; from depthlm.config.schema import Data; from depthlm.data import prepare\n"
        "from depthlm.data.preparation.parts import Part\n"
        "prepare(Data(name='local', source=sys.argv[1], vocab_size=300, validation_fraction=0.2), "
        "part=Part(int(sys.argv[2]), 3))"
    )
    # the third twice, as a requeued job might run beside the one that it replaces
    processes = [subprocess.Popen([sys.executable, "-c", code, text_folder, str(n)]) for n in (0, 1, 2, 2)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert content(token_folders(local())["local"]) == whole


@pytest.mark.parametrize("text", ["3/3", "0/0", "1", "a/b", "-1/2"])
def test_a_part_that_does_not_exist_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"--part={text}"], "prepare.py")
    assert ended.value.code == 2
    assert "must be I/N with I from 0 to N - 1" in capsys.readouterr().err
