from pathlib import Path

import pytest

import depthlm
from depthlm.training import train


@pytest.fixture(scope="session")
def trained(corpus_folder: Path, token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on the small corpus. Tests may add files to it, but not change any."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    overrides = [
        "size=micro", "model=moda", "data=local", f"data.source={corpus_folder}", f"data.path={token_folder}",
        "data.tokenizer=bytes", "data.validation_fraction=0.1", "tracker=none", "precision=fp32",
        "training.sequence_length=48", "training.batch_size=4", "training.max_steps=12", "training.validate_every=null",
        "training.num_threads=1", "training.sample=null", f"output_dir={directory}",
    ]  # fmt: skip
    assert train(depthlm.compose(overrides)) == 0
    return directory
