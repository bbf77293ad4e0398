"""Weights are used only with the token ids that they were trained with."""

from collections.abc import Callable
from pathlib import Path

import pytest

import depthlm
from depthlm.config import Config
from depthlm.data import Tokenizer, bytes_tokenizer
from depthlm.errors import UserError
from depthlm.training import train
from depthlm.training.checkpoint.token_ids import check_token_ids

Overrides = Callable[..., list[str]]
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
