"""Data settings take effect in training."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.data import DataError, open_corpus, validation_batches
from depthlm.errors import UserError
from depthlm.evaluation import total_loss
from depthlm.training import COMPLETE, train

Overrides = Callable[..., list[str]]
MIXTURE = (
    "data.path=null", "data.sources={a: {files: '*-0*', weight: 3}, b: {files: '*-[123]*', weight: 1}}",
    "training.max_steps=12",
)  # fmt: skip


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder)]


def test_a_mixture_logs_the_share_and_epochs_of_each_source(small_run: Overrides, tmp_path: Path) -> None:
    config = depthlm.compose(small_run(*MIXTURE))
    assert train(config) == COMPLETE
    corpus = open_corpus(config.data)
    for row in rows(tmp_path / "run"):
        samples = 4 * row["step"]
        assert row["data/a/share"] + row["data/b/share"] == pytest.approx(1)
        assert abs(row["data/a/share"] * samples - 0.75 * samples) <= 0.5
        windows = (len(corpus.train["b"]) - 1) // 32
        assert row["data/b/epochs"] == pytest.approx(row["data/b/share"] * samples / windows)
    assert {"validation/a/loss", "validation/b/loss"} <= rows(tmp_path / "run")[-1].keys()


def test_a_resumed_mixture_equals_an_uninterrupted_one(small_run: Overrides, tmp_path: Path) -> None:
    assert train(depthlm.compose(small_run(*MIXTURE, name="straight"))) == COMPLETE
    assert train(depthlm.compose(small_run(*MIXTURE, "training.stop_after=5"))) == COMPLETE
    assert train(depthlm.compose(small_run(*MIXTURE, "data.num_workers=2"))) == COMPLETE
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_every_validation_set_has_a_loss_and_a_perplexity(
    small_run: Overrides, tmp_path: Path, corpus_folder: Path
) -> None:
    names = [f"domain{n}" for n in range(10)]
    sets = {name: f"{{source: {corpus_folder}, files: '*{n}.txt'}}" for n, name in enumerate(names)}
    given = "data.validation={" + ", ".join(f"{name}: {entry}" for name, entry in sets.items()) + "}"
    assert train(depthlm.compose(small_run(given, "training.max_steps=4", "data.path=null"))) == COMPLETE
    last, summary = rows(tmp_path / "run")[-1], json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in ["local", *names]:
        loss = last[f"validation/{name}/loss"]
        assert last[f"validation/{name}/perplexity"] == pytest.approx(math.exp(loss))
        assert summary[f"validation/{name}/loss"] == loss
    mean = sum(last[f"validation/{name}/loss"] for name in ["local", *names]) / 11
    assert summary["validation_loss"] == pytest.approx(mean)
    assert len({last[f"validation/{name}/loss"] for name in names}) == 10


def test_a_run_of_epochs_is_as_long_as_its_corpus(small_run: Overrides, tmp_path: Path) -> None:
    settings = ("training.max_steps=null", "training.max_epochs=2", "data.fraction=0.1")
    config = depthlm.compose(small_run(*settings))
    assert train(config) == COMPLETE
    windows = open_corpus(config.data).windows(32)
    assert len(rows(tmp_path / "run")) == 2 * windows // 4
    # the length is known only once the corpus is open, so settings that depend on it are checked then
    with pytest.raises(UserError, match="longer than the run of"):
        train(
            depthlm.compose(small_run(*settings, "schedule.warmup_ratio=null", "schedule.warmup_steps=999", name="b"))
        )


def test_the_shuffle_seed_changes_only_the_order_of_the_data(small_run: Overrides, tmp_path: Path) -> None:
    for name, settings in {
        "one": ["seed=1"], "same": ["seed=1", "data.shuffle_seed=1"], "other": ["seed=1", "data.shuffle_seed=2"],
    }.items():  # fmt: skip
        assert train(depthlm.compose(small_run(*settings, "training.max_steps=3", name=name))) == COMPLETE
    assert losses(tmp_path / "one") == losses(tmp_path / "same")
    assert losses(tmp_path / "one")[1:] != losses(tmp_path / "other")[1:]


def test_a_run_with_a_document_mask_is_loaded_with_it(small_run: Overrides, tmp_path: Path) -> None:
    shared = ("training.max_steps=5", "training.validation_tokens=null")
    config = depthlm.compose(small_run("data.document_mask=true", *shared))
    assert train(config) == COMPLETE
    assert train(depthlm.compose(small_run(*shared, name="without"))) == COMPLETE
    assert losses(tmp_path / "run") != losses(tmp_path / "without")
    # documents are shorter than sequences, so their attention costs less
    flops, of_whole = (
        json.loads((tmp_path / name / "summary.json").read_text())["training_flops"] for name in ("run", "without")
    )
    assert 0.9 * of_whole < flops < of_whole
    model, _ = depthlm.load(tmp_path / "run")
    corpus = open_corpus(config.data)
    assert model.end_of_text == corpus.tokenizer.end_of_text
    masked = total_loss(model, validation_batches(corpus.validation["local"], 32, 4), torch.device("cpu")).mean
    assert masked == pytest.approx(rows(tmp_path / "run")[-1]["validation/local/loss"], rel=1e-6)
    model.end_of_text = None
    unmasked = total_loss(model, validation_batches(corpus.validation["local"], 32, 4), torch.device("cpu")).mean
    assert abs(unmasked - masked) > 1e-5


def test_validation_by_document_gives_each_document_no_context(small_run: Overrides, tmp_path: Path) -> None:
    more = "data.validation_fraction=0.2", f"data.path={tmp_path}/tokens"
    shared = ("training.max_steps=3", "training.validation_tokens=null", *more)
    config = depthlm.compose(small_run("training.validation_document_tokens=4096", *shared))
    assert train(config) == COMPLETE
    measured = rows(tmp_path / "run")[-1]["validation/local/loss"]
    model, _ = depthlm.load(tmp_path / "run")
    corpus = open_corpus(config.data)
    files, end = corpus.validation["local"], corpus.tokenizer.end_of_text
    tokens = files.read(0, min(len(files), config.training.validation_tokens or len(files))).tolist()
    starts = [0, *(i for i, token in enumerate(tokens[:-1]) if token == end)]
    total = 0.0
    for start, stop in zip(starts, [*starts[1:], len(tokens) - 1], strict=True):
        row = torch.tensor([tokens[start : stop + 1]])
        total += model(row[:, :-1], row[:, 1:]).nll.item()
    assert len(starts) > 2
    assert measured == pytest.approx(total / (len(tokens) - 1), rel=1e-6)
    assert train(depthlm.compose(small_run(*shared, name="windows"))) == COMPLETE
    assert abs(rows(tmp_path / "windows")[-1]["validation/local/loss"] - measured) > 1e-5


def test_sequences_with_many_repetitions_have_no_loss(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthlm.data.sampler.most_repetitions", lambda tokens: 40 if tokens[1] % 2 else 31)
    for name, most in (("run", 32), ("all", 41)):
        given = (f"data.max_repetitions={most}", "training.max_steps=3")
        assert train(depthlm.compose(small_run(*given, name=name))) == COMPLETE
    assert 0 < losses(tmp_path / "run")[0] < 0.9 * losses(tmp_path / "all")[0]


def test_a_corpus_too_large_to_prepare_automatically_ends_with_the_command_to_prepare_it(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthlm.data.preparation.estimate.MAX_TRAINING_BYTES", 100)
    config = depthlm.compose(small_run("data.path=elsewhere"))
    with pytest.raises(DataError, match=r"python data/prepare\.py data=local data\.source="):
        train(config)
    assert list(tmp_path.iterdir()) == []
