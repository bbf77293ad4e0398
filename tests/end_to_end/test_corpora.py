"""The five corpora from the hub and from a mirror, with the commands a user types: token files, then a run."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from depthlm import compose
from depthlm.config import prepare_command
from depthlm.data import DataError, Manifest, check_prepared, prepare, token_folders, verify
from depthlm.locations import REPOSITORY
from depthlm.runs.records import read_metrics

from ..fake_hub import FakeHub, fake_hub
from ..forks import Forks
from .corpora import Corpus, Mirrors, corpora, documents_of

CORPORA = corpora()
FRACTION = 0.1
# Without max_tokens the free disk space must suffice for the real corpus; each fixture has fewer tokens.
PREPARED = [f"data.validation_fraction={FRACTION}", "data.max_tokens=1B"]
BATCH = 4
RUN = ["size=micro", "tracker=none", "precision=fp32", "training.max_steps=3", "training.sequence_length=32",
       f"training.batch_size={BATCH}", "training.log_every=1", "training.num_threads=1", "training.sample=null",
       "output_dir=run"]  # fmt: skip


@pytest.fixture(scope="module")
def mirrors(tmp_path_factory: pytest.TempPathFactory) -> Mirrors:
    return Mirrors(CORPORA, tmp_path_factory.mktemp("mirrors"))


@pytest.fixture(scope="module")
def hub(mirrors: Mirrors) -> Iterator[FakeHub]:
    with fake_hub(mirrors.repositories()) as url:
        yield url


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the repository's commands in it and its own token files."""
    (tmp_path / "data").mkdir()
    for name in ("train.py", "conf", "data/prepare.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(hub: FakeHub, checkout: Path, forks: Forks) -> Command:
    """Run a line `python <script> ...` in an environment with this hub only."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        python, *words = shlex.split(line)
        assert python == "python"
        environment = hub.environment(checkout / "home", PATH=os.environ["PATH"])
        done = forks.run(words, cwd=checkout, environment=environment, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def token_bytes(folders: Mapping[str, Path]) -> dict[str, bytes]:
    return {f"{name}/{file.name}": file.read_bytes() for name in folders for file in folders[name].glob("*.bin")}


def check_token_files(corpus: Corpus, folders: Mapping[str, Path], commit: str) -> None:
    assert folders.keys() == corpus.parts.keys()
    for source, folder in folders.items():
        verify(folder)
        manifest = Manifest.read(folder)
        splits = {"train": manifest.train, f"validation-{source}": manifest.validation[source]}
        assert manifest.source["revision"] == commit
        assert manifest.left_out == {}
        for (stem, split), texts in zip(splits.items(), corpus.documents(source, FRACTION), strict=True):
            assert texts
            assert documents_of(folder, stem) == texts
            assert (split.documents, split.bytes) == (len(texts), sum(len(text.encode()) for text in texts))
            assert split.tokens == sum(file.tokens for file in split.files) > len(texts)


def check_run(directory: Path, sources: list[str], weights: Mapping[str, float]) -> None:
    measured = list(read_metrics(directory / "metrics.jsonl"))
    summary = json.loads((directory / "summary.json").read_text())
    assert [row["step"] for row in measured] == [1, 2, 3]
    assert summary["steps"] == 3
    for name in sources:
        for what in ("loss", "perplexity"):
            assert measured[-1][f"validation/{name}/{what}"] == summary[f"validation/{name}/{what}"] > 1
    assert measured[0]["loss"] > measured[-1]["loss"]
    if len(sources) > 1:
        for row in measured:
            samples = row["step"] * BATCH
            shares = {name: row[f"data/{name}/share"] for name in sources}
            assert sum(shares.values()) == pytest.approx(1)
            assert all(abs(shares[name] - weights[name] / sum(weights.values())) < 1 / samples for name in sources)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_prepared_from_the_hub_and_trained_on_and_its_mirror_gives_the_same_bytes(
    name, hub, mirrors, command
):
    corpus = CORPORA[name]
    if name == "pile":
        file = mirrors.root / "pile/train/01.jsonl.zst"
        hub.drops = {file.name: [file.stat().st_size // 2]}
    overrides = [f"data={name}", *PREPARED]
    config = compose([*overrides, *RUN])
    with pytest.raises(DataError, match="not prepared") as unprepared:
        check_prepared(config.data, partial(prepare_command, config))
    done = command(unprepared.value.remedy.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert not any(hub.drops.values()), "the connection was to be dropped"
    folders = token_folders(config.data)
    repo, _, branch = corpus.repo.partition("@")
    check_token_files(corpus, folders, hub.commit(f"datasets/{repo}", branch or "main")[0])

    if name in ("pile", "olmo2_mix"):
        requests = len(hub.requests)
        done = command(" ".join(["python train.py", *overrides, *RUN]))
        assert done.returncode == 0, done.stderr
        assert len(hub.requests) == requests, "training needs no hub"
        weights = {source: entry.weight for source, entry in config.data.sources.items() if entry.weight}
        check_run(Path("run"), list(folders), weights)

    local = [*mirrors.overrides(name), *PREPARED]
    if name == "fineweb_edu":
        local.append("data.files=sample/100BT/*")
    mirrored = prepare(compose(local).data)
    assert mirrored != folders
    assert token_bytes(mirrored) == token_bytes(folders)


def test_training_on_an_unprepared_corpus_prints_the_command_and_downloads_nothing(hub, command):
    requests = len(hub.requests)
    done = command(" ".join(["python train.py data=c4", *RUN]))
    assert done.returncode == 2
    assert "not prepared: c4" in done.stderr
    assert re.search(r"about 360.0 GB of disk .* \d+ (h|min|days) on", done.stderr)
    assert done.stderr.splitlines()[-1].strip() == "python data/prepare.py data=c4"
    assert len(hub.requests) == requests
    assert not Path("data/tokens").exists()
    assert not Path("run").exists()
