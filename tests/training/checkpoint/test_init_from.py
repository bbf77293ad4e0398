"""A run initialized from another's weights computes the same as that run, and logs which weights it could not take."""

import shutil
from pathlib import Path

import pytest
import torch

import depthlm
from depthlm.data import Tokenizer, bytes_tokenizer
from depthlm.errors import UserError
from depthlm.model import Decoder
from depthlm.training import train
from depthlm.training.checkpoint.init_from import copy_weights

from ..run_files import TrainRun, losses, weights


@pytest.fixture
def vanilla(trained: TrainRun) -> Path:
    """The directory of a trained run."""
    return trained("training.max_steps=8", name="vanilla")


def logits(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(64).view(2, 32))


def test_dca_initialized_from_a_vanilla_run_continues_its_loss(train_run, small_run, vanilla, capsys):
    given = ("model=dca", f"init_from={vanilla}", "training.max_steps=8")
    model = depthlm.build_model(depthlm.compose(small_run(*given)))
    copy_weights(weights(vanilla), model)
    torch.testing.assert_close(logits(model), logits(depthlm.load(vanilla)[0]), rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    curve = losses(train_run(*given))
    output = capsys.readouterr().out
    assert f"weights imported from {vanilla}/checkpoints/step-00000008" in output
    assert "6 parameters not found there keep their initialization: connections.*.b (3 of them)" in output
    assert "the weights are from model vanilla, this run trains dca" in output
    # the first loss is before any update
    assert curve[0] < losses(vanilla)[0] - 0.5
    assert curve[-1] < curve[0]


def test_weights_are_imported_once_and_resuming_needs_no_source(train_run, small_run, vanilla):
    given = (f"init_from={vanilla}", "training.max_steps=8")
    straight = train_run(*given, name="straight")
    train_run(*given, "training.stop_after=4")
    shutil.rmtree(vanilla)
    assert losses(train_run(*given)) == losses(straight)
    with pytest.raises(UserError, match=r"init_from: the run has .*vanilla, this command gives None"):
        train(depthlm.compose(small_run("training.max_steps=8")))


def test_weights_that_do_not_fit_are_listed_with_their_shapes_before_training(trained, small_run, tmp_path):
    dca = trained("model=dca", "training.max_steps=1", name="dca")
    with pytest.raises(UserError) as caught:
        train(depthlm.compose(small_run(f"init_from={dca}", "size.intermediate_size=96", name="wrong")))
    text = str(caught.value)
    assert "connections.*.b [3, 1, 64]: this model has no such parameter" in text
    assert "layers.*.attention_norm.*.weight [64]: this model has no such parameter (6 of them)" in text
    assert "layers.*.mlp.up_proj.weight [192, 64]: [96, 64] in this model (2 of them)" in text
    assert "embedding" not in text
    assert not (tmp_path / "wrong/checkpoints").exists()


SHARED = ("data.path=null", "data.vocab_size=300", "size.vocab_size=320", "training.max_steps=1")


def texts(folder: Path, line: str) -> list[str]:
    """Write text of which a BPE of its own has its own ids; returns the overrides that train on it."""
    folder.mkdir(exist_ok=True)
    for number in range(20):
        (folder / f"{number}.txt").write_text(line * (30 + number))
    return [*SHARED, f"data.source={folder}", "data.tokenizer=bpe", "data.validation_fraction=0.3"]


def test_a_tokenizer_trained_again_on_other_text_is_refused(train_run, small_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = texts(tmp_path / "first", "the cat and the hat sat on the mat\n")
    other = texts(tmp_path / "other", "def function(argument): return argument\n")
    source = train_run(*first, name="source")
    given = (*other, f"init_from={source}", "training.max_steps=2")
    with pytest.raises(UserError, match=rf"init_from={source}: its tokenizer differs .*; give data.tokenizer="):
        train(depthlm.compose(small_run(*given)))
    assert not (tmp_path / "run/checkpoints").exists()
    # with the run's own tokenizer, as the error says
    own = f"data.tokenizer={source}/tokenizer.json"
    run = train_run(*given, own)
    assert Tokenizer.load(run).text == Tokenizer.load(source).text
    # a resumed run needs the source no more, whatever became of it
    bytes_tokenizer().save(source)
    train_run(*given, own)
