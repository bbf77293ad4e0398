"""Data settings take effect in training."""

import math
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.data import open_corpus, validation_batches
from depthlm.errors import UserError
from depthlm.files import read_json
from depthlm.losses import total_loss
from depthlm.runs.records import read_metrics
from depthlm.training import train

from .run_files import losses

MIXTURE = (
    "data.path=null", "data.sources={a: {files: '*-0*', weight: 3}, b: {files: '*-[123]*', weight: 1}}",
    "training.max_steps=8",
)  # fmt: skip


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(folder: Path) -> list[dict[str, float]]:
    return list(read_metrics(folder / "metrics.jsonl"))


def test_a_mixture_logs_the_share_and_epochs_of_each_source_and_resumes_as_if_uninterrupted(train_run, small_run):
    straight = train_run(*MIXTURE, name="straight")
    corpus = open_corpus(depthlm.compose(small_run(*MIXTURE)).data)
    for row in rows(straight):
        samples = 4 * row["step"]
        assert row["data/a/share"] + row["data/b/share"] == pytest.approx(1)
        assert abs(row["data/a/share"] * samples - 0.75 * samples) <= 0.5
        windows = (len(corpus.train["b"]) - 1) // 32
        assert row["data/b/epochs"] == pytest.approx(row["data/b/share"] * samples / windows)
    assert {"validation/a/loss", "validation/b/loss"} <= rows(straight)[-1].keys()
    train_run(*MIXTURE, "training.stop_after=5")
    assert losses(train_run(*MIXTURE, "data.num_workers=2")) == losses(straight)


def test_every_validation_set_has_a_loss_and_a_perplexity(train_run, corpus_folder):
    names = [f"domain{n}" for n in range(3)]
    sets = {name: f"{{source: {corpus_folder}, files: '*{n}.txt'}}" for n, name in enumerate(names)}
    given = "data.validation={" + ", ".join(f"{name}: {entry}" for name, entry in sets.items()) + "}"
    run = train_run(given, "training.max_steps=1", "data.path=null")
    last, summary = rows(run)[-1], read_json(run / "summary.json")
    for name in ["local", *names]:
        loss = last[f"validation/{name}/loss"]
        assert last[f"validation/{name}/perplexity"] == pytest.approx(math.exp(loss))
        assert summary[f"validation/{name}/loss"] == loss
    mean = sum(last[f"validation/{name}/loss"] for name in ["local", *names]) / 4
    assert summary["validation_loss"] == pytest.approx(mean)
    assert len({last[f"validation/{name}/loss"] for name in names}) == 3


def test_a_run_of_epochs_is_as_long_as_its_corpus(train_run, small_run):
    settings = ("training.max_steps=null", "training.max_epochs=2", "data.fraction=0.1")
    run = train_run(*settings)
    windows = open_corpus(depthlm.compose(small_run(*settings)).data).windows(32)
    assert len(rows(run)) == 2 * windows // 4
    # the length is known only once the corpus is open, so settings that depend on it are checked then
    warmup = ("schedule.warmup_ratio=null", "schedule.warmup_steps=999")
    with pytest.raises(UserError, match="longer than the run of"):
        train(depthlm.compose(small_run(*settings, *warmup, name="b")))


def test_the_shuffle_seed_changes_the_order_of_the_data(train_run):
    one, other = (
        losses(train_run(f"data.shuffle_seed={seed}", "training.max_steps=2", name=str(seed))) for seed in ("null", 2)
    )
    assert one[1:] != other[1:]


def test_a_run_with_a_document_mask_is_loaded_with_it(train_run):
    shared = ("training.max_steps=5", "training.validation_tokens=null")
    run, without = train_run("data.document_mask=true", *shared), train_run(*shared, name="without")
    assert losses(run) != losses(without)
    # documents are shorter than sequences, so their attention costs less
    flops, of_whole = (read_json(path / "summary.json")["training_flops"] for path in (run, without))
    assert 0.9 * of_whole < flops < of_whole
    model, config = depthlm.load(run)
    corpus = open_corpus(config.data)
    assert model.end_of_text == corpus.tokenizer.end_of_text
    masked = total_loss(model, validation_batches(corpus.validation["local"], 32, 4), torch.device("cpu")).mean
    assert masked == pytest.approx(rows(run)[-1]["validation/local/loss"], rel=1e-6)
    model.end_of_text = None
    unmasked = total_loss(model, validation_batches(corpus.validation["local"], 32, 4), torch.device("cpu")).mean
    assert abs(unmasked - masked) > 1e-5


def test_validation_by_document_gives_each_document_no_context(train_run, tmp_path):
    shared = ("training.max_steps=3", "training.validation_tokens=null", "data.validation_fraction=0.2",
              f"data.path={tmp_path}/tokens")  # fmt: skip
    run = train_run("training.validation_document_tokens=4096", *shared)
    measured = rows(run)[-1]["validation/local/loss"]
    model, config = depthlm.load(run)
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
    assert abs(rows(train_run(*shared, name="windows"))[-1]["validation/local/loss"] - measured) > 1e-5


def test_sequences_with_many_repetitions_have_no_loss(train_run, monkeypatch):
    monkeypatch.setattr("depthlm.data.sampler.most_repetitions", lambda tokens: 40 if tokens[1] % 2 else 31)
    some, whole = (
        losses(train_run(f"data.max_repetitions={most}", "training.max_steps=3", name=str(most))) for most in (32, 41)
    )
    assert 0 < some[0] < 0.9 * whole[0]
