"""Damaged files lead to a clear error or to the right answer. The full run is `python -m tests.fuzz`."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from depthlm.errors import UserError

from . import __main__ as fuzz
from .targets import Target, make_targets


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with fuzz.quiet():
        yield make_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("mutations", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_mutations_of_every_file_give_an_error_or_the_right_answer(targets: list[Any], mutations: int) -> None:
    assert len(targets) > 20
    for target in targets:
        outcome = fuzz.fuzz_reader(target, mutations, seed=2)
        assert outcome.failures == {}
        assert outcome.returned + outcome.refused == mutations


@pytest.mark.slow
def test_commands_give_an_error_or_the_right_answer(targets: list[Any]) -> None:
    assert fuzz.fuzz_commands(targets, 6, seed=2).failures == {}


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
