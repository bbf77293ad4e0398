"""Fixtures for the tests of training."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import depthlm
from depthlm.distributed.launchers import ranks
from depthlm.distributed.process_group import start_distributed
from depthlm.training import train
from depthlm.training.engine import undo_sharding

from ..two_ranks import train_on_ranks


@pytest.fixture(scope="module", autouse=True)
def plain_linear_after_the_module() -> Iterator[None]:
    """Restore what ZeRO 3 replaces in PyTorch, which otherwise remains until the next run of the process."""
    yield
    undo_sharding()


@pytest.fixture(autouse=True)
def only_steps_by_default(request: pytest.FixtureRequest) -> None:
    if "memory" not in request.module.__name__:
        request.getfixturevalue("only_steps")


@pytest.fixture
def fp16_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow fp16 on the CPU, which can compute it slowly, but which the configuration and DeepSpeed refuse."""
    start_distributed(ranks())
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    monkeypatch.setattr("depthlm.config.validate.machine._check_device", lambda config: [])


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs that several tests start from."""
    return tmp_path_factory.mktemp("shared_runs")


@pytest.fixture
def trained(small_run: Callable[..., list[str]], shared_runs: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return the test's own copy of a run with these overrides, which is trained once per session."""

    def copied(*overrides: str, name: str = "run") -> Path:
        source = shared_runs / hashlib.sha256(repr(overrides).encode()).hexdigest()
        if not source.exists():
            untested = source.with_suffix(".incomplete")
            assert train(depthlm.compose(small_run(*overrides, f"output_dir={untested}"))) == 0
            untested.rename(source)
        return Path(shutil.copytree(source, tmp_path / name))

    return copied


@pytest.fixture
def train_run(
    request: pytest.FixtureRequest, small_run: Callable[..., list[str]], tmp_path: Path
) -> Callable[..., Path]:
    """Train a run with these overrides on one rank or on two, which must succeed, and return its directory.

    stops: it is stopped after each of these steps, and resumed.
    """

    def completed(*overrides: str, name: str = "run", ranks: int = 1, stops: Sequence[int] = ()) -> Path:
        for more in [(f"training.stop_after={stop}",) for stop in stops] or [()]:
            given = small_run(*overrides, *more, name=name)
            if ranks == 1:
                assert train(depthlm.compose(given)) == 0
            else:
                assert request.getfixturevalue("two_ranks")(train_on_ranks, given) == [0, 0]
        return tmp_path / name

    return completed
