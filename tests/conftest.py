"""Settings and fixtures of all tests: one thread, no network, a small corpus, and short runs on it."""

import functools
import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from .forks import Forks
from .two_ranks import TwoRanks

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# as depthlm.data does when it is imported, which a forked command does not repeat
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# most runs are short, so waiting for a disk would take a large share of their time
MEMORY_DISK, NEEDED_BYTES = Path("/dev/shm"), 6 * 2**30
if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > NEEDED_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))
torch.set_num_threads(1)
# the default looks for garbage so often that it takes a tenth of the time
gc.set_threshold(20_000, 20, 20)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# how long an example takes depends on what else the machine does
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

TEXT = "the depth of a stream is read by every layer and written once more before the head reads it"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="regenerate the golden values instead of comparing")


@functools.cache
def exempt_from_garbage_collection(path: Path, modules: int) -> None:
    """Exempt what exists now, once for each file of tests and number of imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cheap_garbage_collection(request: pytest.FixtureRequest) -> None:
    """Look for garbage in what is new; looking at all imports would take a third of the time of a short run."""
    exempt_from_garbage_collection(request.path, len(sys.modules))


@pytest.fixture(autouse=True)
def same_working_directory(pytestconfig: pytest.Config) -> Iterator[None]:
    """Leave the folder of a test, which is removed."""
    yield
    os.chdir(pytestconfig.rootpath)


@pytest.fixture(autouse=True)
def same_log_handlers() -> Iterator[None]:
    """Remove the log handlers that a test adds, which would write to its captured output after it is closed."""
    loggers = [logging.getLogger(), logging.getLogger("depthlm")]
    before = [list(logger.handlers) for logger in loggers]
    yield
    for logger, handlers in zip(loggers, before, strict=True):
        for handler in [handler for handler in logger.handlers if handler not in handlers]:
            logger.removeHandler(handler)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 small text files, the same in every session."""
    folder = tmp_path_factory.mktemp("corpus")
    vocabulary = TEXT.split()
    for number in range(40):
        words = [vocabulary[(number * 7 + i * i) % len(vocabulary)] for i in range(120)]
        (folder / f"text-{number:02d}.txt").write_text(" ".join(words) + "\n")
    return folder


@pytest.fixture(scope="session")
def two_ranks(forks: Forks) -> Iterator[TwoRanks]:
    """Two processes that train together, started once per session."""
    ranks = TwoRanks(forks)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Forks]:
    """Starts commands in processes of their own, without the time that their imports take."""
    folder = tmp_path_factory.getbasetemp()
    # the workers of a session share the folder above their own
    forks = Forks(folder if worker_id == "master" else folder.parent)
    yield forks
    forks.close()


@pytest.fixture
def only_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train without an estimate of the memory and a picture of the losses, which take half of a short run.

    Their own tests make them.
    """
    monkeypatch.setattr("depthlm.training.setup.check_memory", lambda *_: None)
    monkeypatch.setattr("depthlm.training.monitoring.describe.plot_loss", lambda *_: None)


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that corpus's token files, which are prepared once per session."""
    return tmp_path_factory.mktemp("tokens") / "bytes"


def short_run(corpus_folder: Path, token_folder: Path, output_dir: Path, *more: str) -> list[str]:
    """Return the overrides of a short run on the small corpus. Later overrides win."""
    settings = {
        "size": "micro",
        "data": "local",
        "data.source": str(corpus_folder),
        "data.path": str(token_folder),
        "data.tokenizer": "bytes",
        "data.validation_fraction": "0.1",
        "tracker": "none",
        "precision": "fp32",
        "training.sequence_length": "32",
        "training.batch_size": "4",
        "training.max_steps": "20",
        "training.log_every": "1",
        "training.validate_every": "null",
        "training.validation_tokens": "256",
        "training.checkpoint_every": "10",
        "training.num_threads": "1",
        "training.sample": "null",
        "output_dir": str(output_dir),
    }
    for override in more:
        key, _, value = override.partition("=")
        settings[key] = value
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture
def small_run(corpus_folder: Path, token_folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Build the overrides of a short run in the test's own directory."""
    return lambda *more, name="run": short_run(corpus_folder, token_folder, tmp_path / name, *more)
