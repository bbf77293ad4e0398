"""The arguments of the command that prepares a corpus, or imports ids."""

from pathlib import Path

import numpy as np
import pytest

from depthlm.commands.prepare import main
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
