"""Damaged files lead to a clear error or to the right answer. The full run is `python -m tests.fuzz`."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from depthlm.errors import UserError
from depthlm.locations import PACKAGE

from . import __main__ as fuzz
from .targets import NOT_FOREIGN, READERS, Target, make_targets


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with fuzz.quiet():
        yield make_targets(tmp_path_factory.mktemp("fuzz"))


def test_mutations_of_every_file_give_an_error_or_the_right_answer(targets: list[Any]) -> None:
    for target in targets:
        outcome = fuzz.fuzz_reader(target, 3, seed=2)
        assert outcome.failures == {}
        assert outcome.returned + outcome.refused == 3


def test_a_pipe_in_place_of_a_file_does_not_block_its_reader(targets: list[Any]) -> None:
    # prompts may come from a pipe
    for target in (target for target in targets if target.name != "prompts"):
        original = target.file.rename(target.file.with_name("original"))
        os.mkfifo(target.file)
        try:
            # a copy that a target makes first is not made of a pipe
            with suppress(UserError, shutil.SpecialFileError, shutil.Error), fuzz.limited(5):
                target.read(target.file)
        finally:
            target.file.unlink(missing_ok=True)
            original.rename(target.file)


def test_every_module_that_reads_files_has_targets(targets: list[Any]) -> None:
    call = re.compile(
        r"(?<!def )\b(read_(text|bytes|json|yaml|record)|open_regular|safe_open|load_file|ParquetFile|from_file)\("
        r"|digest\((?!\))|\.open\(\"r|(?<=with )open\(|(?<== )open\(|\b(np|torch|yaml|json)\.load\("
    )
    files = [file for file in PACKAGE.rglob("*.py") if call.search(file.read_text())]
    reading = {str(file.relative_to(PACKAGE).with_suffix("")) for file in files}
    assert reading == {*READERS} | NOT_FOREIGN
    assert {name for names in READERS.values() for name in names} == {target.name for target in targets}


@pytest.mark.slow
def test_commands_give_an_error_or_the_right_answer(targets: list[Any]) -> None:
    assert fuzz.fuzz_commands(targets, 3, seed=2).failures == {}


def test_a_crash_another_answer_and_a_hang_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("content")

    def crash(file: Path) -> str:
        if (text := file.read_bytes().decode(errors="replace")) != "content":
            raise IndexError("no such key")
        return text

    def wait(file: Path) -> None:
        while True:
            pass

    def refuse(file: Path) -> None:
        raise UserError("damaged")

    monkeypatch.setattr(fuzz, "READER_SECONDS", 1)
    for read, words in ((crash, "no such key"), (Path.read_bytes, "another answer"), (wait, "longer than 1 s")):
        failures = fuzz.fuzz_reader(Target("file", file, read, exact=read is not wait), 1, seed=0).failures
        assert [words in text for text in failures.values()] == [True]
    assert fuzz.fuzz_reader(Target("file", file, refuse), 1, seed=0).refused == 1
    assert file.read_text() == "content"


def test_mutations_depend_on_their_seed_alone() -> None:
    content = b'{"a": [1, {"b": "text"}]}\n' * 3
    drawn = [fuzz.mutated(content, random.Random(seed)) for seed in range(200)]
    assert drawn == [fuzz.mutated(content, random.Random(seed)) for seed in range(200)]
    assert sum(one == content for one in drawn) < 10
