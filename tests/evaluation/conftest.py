from pathlib import Path

import pytest

import depthlm
from depthlm.training import train

from ..conftest import short_run


@pytest.fixture(scope="session")
def trained(corpus_folder: Path, token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on the small corpus. Tests may add files to it, but not change any."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    more = "model=moda", "training.sequence_length=48", "training.max_steps=12", "training.validation_tokens=null"
    assert train(depthlm.compose(short_run(corpus_folder, token_folder, directory, *more))) == 0
    return directory
