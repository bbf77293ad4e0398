"""The command that prepares a corpus, or imports ids."""

import json

import numpy as np
import pytest

from depthlm.commands.prepare import main, read_options
from depthlm.config import ConfigError
from depthlm.data import Manifest
from depthlm.errors import UserError

CORPUS = ["--import-tokens", "ids.npy", "--tokenizer", "bytes", "--to", "ice"]


def test_a_corpus_is_prepared_once_and_summarised_and_a_mistake_exits_with_2(corpus_folder, tmp_path, forks, capsys):
    overrides = ["data=local", f"data.source={corpus_folder}", "data.tokenizer=bytes", f"data.path={tmp_path}/tokens"]
    done = forks.run(["data/prepare.py", *overrides])
    assert done.returncode == 0, done.stderr
    before = (tmp_path / "tokens/manifest.json").stat()
    main(overrides, "prepare")
    assert "22,257" in done.stdout
    assert "22,257" in capsys.readouterr().out
    # as copied from the command that trains on another machine
    main([*overrides, "precision=fp16", "deepspeed=zero1", "device=cuda", "init_from=not/yet/trained"], "prepare")
    assert (tmp_path / "tokens/manifest.json").stat() == before
    done = forks.run(["data/prepare.py", "data=local", f"data.source={tmp_path}/nowhere"])
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    # the text of other sources, and the tokenizer of what is only verified, may be elsewhere
    elsewhere = f"data.validation.other.source={tmp_path}/nowhere"
    main([*overrides, elsewhere, "--only", "local"], "prepare")
    with pytest.raises(ConfigError, match=r"data\.validation\.other\.source=.*nowhere: no such folder or file"):
        main([*overrides, elsewhere], "prepare")


def test_ids_that_were_tokenized_elsewhere_become_token_files_of_the_working_directory(tmp_path, monkeypatch, capsys):
    ids = [*b"a document", 256, *b"another", 256]
    np.array(ids[:5], "<u4").tofile(tmp_path / "part-0.npy")
    np.array(ids[5:], "<u4").tofile(tmp_path / "part-1.npy")
    (tmp_path / "ice").mkdir()
    monkeypatch.chdir(tmp_path / "ice")
    files = ["../part-0.npy", "../part-1.npy"]
    command = ["--import-tokens", *files, "--tokenizer", "bytes", "--to", "."]
    main([*command, "--dtype", "uint32"], "prepare")
    assert {"ice", "validation", "2", "19", "1"} <= {*capsys.readouterr().out.split()}
    # the folder is another one now
    monkeypatch.chdir(tmp_path / "ice")
    manifest = Manifest.read(tmp_path / "ice")
    assert (manifest.name, [*manifest.validation]) == ("ice", ["ice"])
    assert (tmp_path / "ice/validation-ice-00000.bin").stat().st_size == 19 * 2
    (split,) = json.loads((tmp_path / "ice/manifest.json").read_text())["validation"].values()
    assert (split["documents"], split["tokens"], split["bytes"]) == (2, 19, 17)
    for wrong, words in (
        ([*command[:-1], "../other"], "no header that says the dtype"),
        ([*command[:-1], "../other", "--dtype", "uint16"], "or check --dtype"),
        (["data=stdlib", *CORPUS], "no overrides"),
        ([*command, "--dtype", "uint32", "--held-out", "0"], "above 0"),
    ):
        with pytest.raises((SystemExit, UserError)) as caught:
            main(wrong, "prepare")
        assert words in " ".join(f"{caught.value} {capsys.readouterr().err}".split())


def test_options_for_a_corpus_are_refused_beside_ids_and_those_for_ids_without_them(capsys):
    for arguments, words in (
        *(([*CORPUS, *option], option[0]) for option in (["--verify"], ["--only", "dclm"])),
        *((["data=stdlib", *option], "need --import-tokens") for option in (["--held-out", "1"], ["--to", "ice"])),
    ):
        with pytest.raises(SystemExit) as caught:
            read_options(arguments, "prepare")
        assert caught.value.code == 2
        assert words in capsys.readouterr().err.partition("error:")[2]


def test_a_name_of_no_source_is_an_error_also_for_verify():
    for option in ([], ["--verify"]):
        with pytest.raises(UserError, match="no such source: wiki"):
            main(["data=stdlib", "data.tokenizer=bytes", "--only", "wiki", *option], "prepare")
