"""Damaged files lead to a clear error or to the right answer. The full run is `python -m tests.fuzz`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from depthlm.errors import UserError

from . import __main__ as fuzz
from .targets import make_targets


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with fuzz.quiet():
        yield make_targets(tmp_path_factory.mktemp("fuzz"))


def test_mutations_of_every_file_give_an_error_or_the_right_answer(targets):
    for target in targets:
        outcome = fuzz.fuzz_reader(target, 3, seed=2)
        assert outcome.failures == {}
        assert outcome.returned + outcome.refused == 3


def test_a_pipe_in_place_of_a_file_does_not_block_its_reader(targets):
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


@pytest.mark.slow
def test_commands_give_an_error_or_the_right_answer(targets):
    assert fuzz.fuzz_commands(targets, 3, seed=2).failures == {}
