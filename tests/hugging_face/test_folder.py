"""Refused and failed exports, which must not change any file."""

import json
from pathlib import Path

import pytest
from safetensors import SafetensorError
from tokenizers import Tokenizer as Encoder

from depthlm.data import Tokenizer, bytes_tokenizer
from depthlm.errors import UserError
from depthlm.hugging_face import export
from depthlm.hugging_face.folder import as_tokenizer, collect, write_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_earlier_export_is_replaced_completely(make_run, tmp_path):
    to = tmp_path / "some/export"
    first = export(make_run("model=mhc", name="mhc"), to)
    left_by_a_killed_export = tmp_path / "some/.export.killed.partial/new"
    left_by_a_killed_export.mkdir(parents=True)
    second = export(make_run("model=moda", name="moda"), to)
    assert second.files.keys() == contents(to).keys()
    assert second.files["model.safetensors"] != first.files["model.safetensors"]
    assert not [name for name in second.files if "hyper" in name]
    assert [*to.parent.iterdir()] == [to]
    assert len({file.stat().st_mode for file in to.iterdir()}) == 1
    about = json.loads((to / "depthlm.json").read_text())
    assert (about["run"], about["mechanism"], about["parameters"]) == ("moda", "moda", second.parameters)
    # the same run gives the same files
    export(tmp_path / "moda", tmp_path / "other")
    assert contents(tmp_path / "other") == contents(to)


def test_files_that_no_export_wrote_are_kept(make_run, tmp_path):
    run, to = make_run(), tmp_path / "export"
    to.mkdir()
    (to / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"to=.*export: the folder has files \(notes.txt\), but no export; give a new"):
        export(run, to)
    (to / "notes.txt").unlink()
    export(run, to)
    (to / "notes.md").write_text("mine")
    before = contents(to)
    with pytest.raises(UserError, match=r"notes.md is not part of the export in this folder, .* be lost; move it"):
        export(run, to)
    with pytest.raises(UserError, match=r"the folder has files .*, but no export"):
        export(run, run)
    assert contents(to) == before
    (to / "notes.md").unlink()
    (to / "README.md").write_text("my own words")
    with pytest.raises(UserError, match=r"README.md was edited since the export, and would be lost; move it"):
        export(run, to)
    assert (to / "README.md").read_text() == "my own words"


def test_a_target_that_cannot_be_written_is_a_user_error(make_run, tmp_path, monkeypatch):
    run = make_run()
    (tmp_path / "file").touch()
    for to in (tmp_path / "file", tmp_path / "file/export"):
        with pytest.raises(UserError, match=r"to=.*: .*file is not a folder that this user may write to"):
            export(run, to)
    to = export(run, tmp_path / "export").folder
    before = contents(to)

    def full(*arguments: object, **settings: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("depthlm.hugging_face.folder.save_file", full)
    with pytest.raises(UserError, match=r"to=.*export: cannot be written .*No space left on device"):
        export(run, to)
    assert contents(to) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "file", "run"]


MODULES = {
    "imports_whole": ("import depthlm.model.layers\n", "import depthlm.model.layers: .* write `from depthlm"),
    "imports_package": ("from depthlm.model import layers\n", "from depthlm.model import layers: .* defines them"),
    "needs_more": ("import pytest\n", "import of pytest: .* only need PyTorch, transformers and NumPy"),
    "needs_other": ("from needs_more import x\n", "import of pytest"),
}


def test_code_that_cannot_be_exported_is_reported_with_its_line(tmp_path, monkeypatch):
    for module, (text, _) in MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, (_, message) in MODULES.items():
        with pytest.raises(UserError, match=rf"\w+.py:1: {message}"):
            collect([module])


def test_only_imports_of_copied_code_are_changed(tmp_path, monkeypatch):
    package = tmp_path / "reader"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("X = 1\n")
    text = (
        "import math, json\nfrom typing import (\n    Any,\n)\n"
        "try:\n    import absent\nexcept ImportError:\n    pass\n"
        "from depthlm.model.shape import (\n    SublayerSpec as Where,\n)\n"
        # neither ends a line of Python
        "\x0c\nNAME = '\u2028'\ndef f():\n    from .part import X\n    return X\n"
    )
    (package / "main.py").write_text(text)
    (tmp_path / "beside.py").write_text("from reader.main import f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = collect(["beside"])
    assert texts.keys() == {"beside", "reader.main", "reader.part", "depthlm.model.shape", "depthlm.fields"}
    assert texts["beside"] == "from .reader_main import f\n"
    expected = text.replace("from depthlm.model.shape", "from .depthlm_model_shape").replace(".part", ".reader_part")
    assert texts["reader.main"] == expected


def test_an_export_has_the_chosen_end_of_text_and_no_dropout(tmp_path):
    encoder = Encoder.from_str(bytes_tokenizer().text)
    encoder.add_tokens(["<stop>"])
    record = json.loads(encoder.to_str())
    record["model"]["dropout"] = 0.5
    ours = Tokenizer(json.dumps(record), end_of_text="<stop>")
    assert ours.end_of_text == 258
    theirs = as_tokenizer(ours)
    assert theirs.eos_token_id == 258
    write_tokenizer(theirs, tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.end_of_text, loaded.dropout) == (258, None)
    assert theirs("a<stop>").input_ids == list(b"a<stop>") == loaded.encode_batch(["a<stop>"])[0]
