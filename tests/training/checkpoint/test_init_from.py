"""A run initialized from another's weights computes the same as that run, and logs which weights it could not take."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import depthlm
from depthlm.config import Config
from depthlm.config.names import run_name
from depthlm.data import Tokenizer, bytes_tokenizer
from depthlm.errors import UserError
from depthlm.locations import REPOSITORY
from depthlm.model import Decoder
from depthlm.runs.records import read_metrics
from depthlm.training import train
from depthlm.training.checkpoint.init_from import check_token_ids, copy_weights

Overrides = Callable[..., list[str]]


@pytest.fixture
def vanilla(trained: Callable[..., Path]) -> Path:
    """The directory of a trained run."""
    return trained("training.max_steps=8", name="vanilla")


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]


def logits(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(64).view(2, 32))


def test_dca_initialized_from_a_vanilla_run_continues_its_loss(
    small_run: Overrides, tmp_path: Path, vanilla: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = depthlm.compose(small_run("model=dca", f"init_from={vanilla}", name="dca"))
    model = depthlm.build_model(config)
    copy_weights(load_file(vanilla / "checkpoints/step-00000008/model.safetensors"), model)
    torch.testing.assert_close(logits(model), logits(depthlm.load(vanilla)[0]), rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert train(config) == 0
    output = capsys.readouterr().out
    assert f"weights imported from {vanilla}/checkpoints/step-00000008" in output
    assert "6 parameters not found there keep their initialization: connections.*.b (3 of them)" in output
    assert "the weights are from model vanilla, this run trains dca" in output
    assert train(depthlm.compose(small_run(f"init_from={vanilla}", "training.max_steps=1", name="again"))) == 0
    curve = losses(tmp_path / "dca")
    # the first loss is before any update
    assert curve[0] == pytest.approx(losses(tmp_path / "again")[0], rel=1e-5)
    assert curve[0] < losses(vanilla)[0] - 0.5
    assert curve[-1] < curve[0] - 0.5


def test_weights_are_imported_once_and_resuming_needs_no_source(
    small_run: Overrides, tmp_path: Path, vanilla: Path
) -> None:
    for name, stop in (("straight", "null"), ("resumed", "4")):
        overrides = small_run(f"init_from={vanilla}", "training.max_steps=8", f"training.stop_after={stop}", name=name)
        assert train(depthlm.compose(overrides)) == 0
    shutil.rmtree(vanilla)
    overrides = small_run(f"init_from={vanilla}", "training.max_steps=8", name="resumed")
    assert train(depthlm.compose(overrides)) == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")
    with pytest.raises(UserError, match=r"init_from: the run has .*vanilla, this command gives None"):
        train(depthlm.compose(small_run("training.max_steps=8", name="resumed")))


def test_weights_that_do_not_fit_are_listed_with_their_shapes_before_training(
    small_run: Overrides, tmp_path: Path, vanilla: Path
) -> None:
    dca = small_run("model=dca", f"init_from={vanilla}", "training.max_steps=1", name="dca")
    assert train(depthlm.compose(dca)) == 0
    with pytest.raises(UserError) as caught:
        train(depthlm.compose(small_run(f"init_from={tmp_path}/dca", "size.intermediate_size=96", name="wrong")))
    text = str(caught.value)
    assert "connections.*.b [3, 1, 64]: this model has no such parameter" in text
    assert "layers.*.attention_norm.*.weight [64]: this model has no such parameter (6 of them)" in text
    assert "layers.*.mlp.up_proj.weight [192, 64]: [96, 64] in this model (2 of them)" in text
    assert "embedding" not in text
    assert not (tmp_path / "wrong/checkpoints").exists()
    model = depthlm.build_model(depthlm.compose(small_run("size.intermediate_size=96")))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError):
        copy_weights(load_file(vanilla / "checkpoints/step-00000008/model.safetensors"), model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_every_mechanism_takes_vanillas_weights_and_its_own(small_run: Overrides) -> None:
    source = depthlm.build_model(depthlm.compose(small_run("seed=2"))).state_dict()
    for file in sorted((REPOSITORY / "conf/model").glob("*.yaml")):
        model = depthlm.build_model(depthlm.compose(small_run(f"model={file.stem}")))
        same = copy.deepcopy(model)
        if file.stem == "shared_kv":
            # its layers that reuse keys and values have no place for the projections
            with pytest.raises(UserError, match=r"k_proj.*this model has no such parameter"):
                copy_weights(source, model)
            continue
        kept = copy_weights(source, model)
        for name, tensor in model.state_dict().items():
            # each of the three norms of an attention's inputs gets the weights of vanilla's single norm
            shared = name.replace("_norm.0", "_norm").replace("_norm.1", "_norm").replace("_norm.2", "_norm")
            assert name in kept or torch.equal(tensor, source[shared])
        assert not set(kept) & set(source)
        assert copy_weights(model.state_dict(), same) == []
        assert torch.equal(logits(same), logits(model))


def test_a_run_without_a_valid_checkpoint_is_refused(small_run: Overrides, vanilla: Path) -> None:
    with pytest.raises(UserError, match=r"init_from=.*nowhere: no checkpoint in it"):
        depthlm.compose(small_run("init_from=/nowhere"))
    config = depthlm.compose(small_run(f"init_from={vanilla}"))
    (vanilla / "checkpoints/step-00000008/model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="no complete checkpoint in it"):
        train(config)


def test_the_source_is_part_of_the_run_name() -> None:
    assert run_name(["init_from=outputs/default/base"]) != run_name(["init_from=outputs/default/other"])


SHARED = ("data.path=null", "data.vocab_size=300", "size.vocab_size=320", "training.max_steps=1")


def texts(folder: Path, line: str) -> list[str]:
    """Write text of which a BPE of its own has its own ids; returns the overrides that train on it."""
    folder.mkdir(exist_ok=True)
    for number in range(20):
        (folder / f"{number}.txt").write_text(line * (30 + number))
    return [*SHARED, f"data.source={folder}", "data.tokenizer=bpe", "data.validation_fraction=0.3"]


@pytest.mark.parametrize("key", ["init_from", "fork_from"])
@pytest.mark.parametrize("start", ["", "checkpoints/step-00000001"])
def test_a_tokenizer_trained_again_on_other_text_is_refused(
    small_run: Overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, start: str
) -> None:
    monkeypatch.chdir(tmp_path)
    first = texts(tmp_path / "first", "the cat and the hat sat on the mat\n")
    other = texts(tmp_path / "other", "def function(argument): return argument\n")
    assert train(depthlm.compose(small_run(*first, name="source"))) == 0
    source = tmp_path / "source" / start
    with pytest.raises(UserError, match=rf"{key}={source}: its tokenizer differs .* in the run; give data.tokenizer="):
        train(depthlm.compose(small_run(*other, f"{key}={source}", "training.max_steps=2", name="next")))
    assert not (tmp_path / "next/checkpoints").exists()
    # with the run's own tokenizer, as the error says
    own = f"data.tokenizer={tmp_path}/source/tokenizer.json"
    config = depthlm.compose(small_run(*other, own, f"{key}={source}", "training.max_steps=2", name="next"))
    assert train(config) == 0
    assert Tokenizer.load(tmp_path / "next").text == Tokenizer.load(tmp_path / "source").text
    # a resumed run needs the source no more, whatever became of it
    bytes_tokenizer().save(tmp_path / "source")
    assert train(config) == 0


def test_a_source_without_a_tokenizer_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(init_from=str(tmp_path / "a/checkpoints/step-00000001"))
    check_token_ids(config, bytes_tokenizer())
    assert "no tokenizer.json there" in caplog.text
