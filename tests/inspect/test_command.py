"""`python -m depthlm inspect`: its files, its output and its error messages."""

import shutil
import sys

import numpy as np
import pytest
import torch

from depthlm.__main__ import main
from depthlm.config.arguments import read_arguments
from depthlm.inspect.command import Inspect, draw_mechanism, read_run, windows


def inspect(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["depthlm", "inspect", *words])
    main()


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        inspect(monkeypatch, *words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("rendered")
def test_writes_pictures_and_arrays(trained, monkeypatch, capsys):
    inspect(monkeypatch, f"run={trained}", "tokens=100")
    names = {"moda_maps", "moda_depth_share", "moda_depth_total", "attention_residuals_weights"}
    names |= {"depth_mixing"}
    assert {file.stem for file in (trained / "inspect").glob("*.png")} == names
    assert all(file.stat().st_size > 10_000 for file in (trained / "inspect").glob("*.png"))
    output = capsys.readouterr().out
    assert "96 tokens of the validation set local, in windows of 32" in output
    assert all(f"{name}.png" in output for name in names)
    arrays = np.load(trained / "inspect" / "arrays.npz")
    assert all(f"{name} {list(arrays[name].shape)}" in output for name in arrays)
    np.testing.assert_allclose(arrays["attention_residuals_weights_final"].sum(), 1, rtol=1e-5)


def test_own_text_another_folder_and_several_runs(trained, tmp_path, monkeypatch, capsys):
    inspect(monkeypatch, f"run={trained}", "text=the depth of a stream", f"to={tmp_path / 'new' / 'there'}")
    assert "21 tokens of the given text" in capsys.readouterr().out
    folder = tmp_path / "new" / "there"
    assert np.load(folder / "arrays.npz")["moda_maps_1"].shape == (2, 21, 23)
    inspect(monkeypatch, f"run={trained}", f"compare={trained},{trained}", "text=the depth", f"to={tmp_path}")
    arrays = np.load(tmp_path / "arrays.npz")
    assert arrays["depth_mixing"].shape == (5, 5)
    for number in (2, 3):
        np.testing.assert_array_equal(arrays[f"depth_mixing_{number}"], arrays["depth_mixing"])


def test_runs_of_one_mechanism_and_size_are_named_by_their_directories(trained, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    arguments = read_arguments(Inspect, [f"run={trained}", f"compare={other}", "text=the depth"])
    pictures, _ = draw_mechanism(read_run(trained, arguments), arguments)
    (matrices,) = (picture.draw.args[0] for picture in pictures if picture.name == "depth_mixing")
    assert [title.replace("\n", "") for title, _ in matrices] == [str(trained), str(other)]


def test_windows_contain_every_token_once():
    tokens = torch.arange(5 * 1024 + 3)
    batches = windows(tokens, 1024)
    assert [tuple(part.shape) for part in batches] == [(2, 1024), (2, 1024), (1, 1024), (1, 3)]
    assert torch.equal(torch.cat([part.flatten() for part in batches]), tokens)
    assert [tuple(part.shape) for part in windows(tokens[:5], 4096)] == [(1, 5)]


def test_bad_arguments_are_refused(trained, tmp_path, monkeypatch, capsys):
    bare, file = tmp_path / "bare", tmp_path / "file"
    shutil.copytree(trained, bare, ignore=shutil.ignore_patterns("checkpoints"))
    file.write_text("")
    for words, message in {
        "": "run=...: is missing",
        f"run={tmp_path}": f"{tmp_path}: no run in it",
        f"run={trained} text=a compare={tmp_path}": f"{tmp_path}: no run in it",
        f"run={trained} token=5": "did you mean",
        f"run={trained} tokens=0": "tokens=0: must be",
        f"run={trained} text=": "it has no tokens",
        f"run={trained} text=a to={file}/below": f"{file}/below: cannot be written to",
        f"run={bare}": f"no checkpoint in it; python train.py run={bare} resume=retrain",
    }.items():
        assert message in refused(monkeypatch, capsys, *words.split())


def test_missing_token_files_and_a_full_disk_are_reported_without_traceback(
    trained, token_folder, tmp_path, monkeypatch, capsys
):
    away = token_folder.rename(token_folder.with_name("away"))
    try:
        text = refused(monkeypatch, capsys, f"run={trained}")
    finally:
        away.rename(token_folder)
    assert str(token_folder) in text
    assert "text=" in text

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez_compressed", full)
    text = refused(monkeypatch, capsys, f"run={trained}", "text=a b", f"to={tmp_path / 'full'}")
    assert "No space left on device" in text
