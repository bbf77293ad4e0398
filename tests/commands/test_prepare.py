"""The arguments of the command that prepares a corpus, or imports ids."""

from pathlib import Path

import numpy as np
import pytest

from depthlm.commands.prepare import main, read_options
from depthlm.data import Manifest


def test_ids_can_be_imported_into_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.array([*b"a document", 256], "<u4"))
    (tmp_path / "ice").mkdir()
    monkeypatch.chdir(tmp_path / "ice")
    main(["--import-tokens", "../ids.npy", "--tokenizer", "bytes", "--to", "."], "prepare")
    assert "ice" in capsys.readouterr().out.split()
    manifest = Manifest.read(tmp_path / "ice")
    assert (manifest.name, [*manifest.validation]) == ("ice", ["ice"])
    assert (tmp_path / "ice/validation-ice-00000.bin").stat().st_size == 11 * 2


@pytest.mark.parametrize(
    "option", [["--verify"], ["--part", "0/2"], ["--only", "dclm"], ["--config-dir", "conf"]], ids=" ".join
)
def test_options_for_a_corpus_are_refused_beside_ids(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_options(["--import-tokens", "ids.npy", "--tokenizer", "bytes", "--to", "ice", *option], "prepare")
    assert caught.value.code == 2
    assert option[0] in capsys.readouterr().err.partition("error:")[2]


@pytest.mark.parametrize(
    "option",
    [["--held-out", "0.3"], ["--held-out", "1"], ["--dtype", "uint16"], ["--end-of-text", "."], ["--to", "ice"]],
    ids=" ".join,
)
def test_options_for_ids_are_refused_without_them(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_options(["data=stdlib", *option], "prepare")
    assert caught.value.code == 2
    assert "need --import-tokens" in capsys.readouterr().err
