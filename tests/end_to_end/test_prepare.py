"""The command that prepares a corpus."""

import json
from pathlib import Path

import numpy as np

from ..forks import Forks

PREPARE = "data/prepare.py"


def test_a_corpus_is_prepared_once_and_summarised(corpus_folder: Path, tmp_path: Path, forks: Forks) -> None:
    overrides = ["data=local", f"data.source={corpus_folder}", "data.tokenizer=bytes", f"data.path={tmp_path}/tokens"]
    for _ in range(2):
        done = forks.run([PREPARE, *overrides])
        assert done.returncode == 0, done.stderr
        assert "22,257" in done.stdout
    assert (tmp_path / "tokens/manifest.json").exists()


def test_a_user_error_exits_with_2_and_without_a_traceback(tmp_path: Path, forks: Forks) -> None:
    for overrides in (["data=local"], ["data=local", f"data.source={tmp_path}"], ["data=locl"]):
        done = forks.run([PREPARE, *overrides])
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr


def test_ids_that_were_tokenized_elsewhere_become_token_files(tmp_path: Path, forks: Forks) -> None:
    ids = [*b"a document", 256, *b"another", 256]
    files = [str(tmp_path / name) for name in ("part-0.npy", "part-1.npy")]
    np.array(ids[:5], "<u4").tofile(files[0])
    np.array(ids[5:], "<u4").tofile(files[1])
    command = [PREPARE, "--import-tokens", *files, "--tokenizer", "bytes", "--to", f"{tmp_path}/sets/ice"]
    done = forks.run([*command, "--dtype", "uint32"])
    assert done.returncode == 0, done.stderr
    assert "by " in done.stderr
    assert {"ice", "validation", "2", "19", "1"} <= {*done.stdout.split()}
    (split,) = json.loads((tmp_path / "sets/ice/manifest.json").read_text())["validation"].values()
    assert (split["documents"], split["tokens"], split["bytes"]) == (2, 19, 17)
    for wrong, words in (
        ([*command[:-1], f"{tmp_path}/other"], "no header that says the dtype"),
        ([*command, "--dtype", "float32"], "invalid choice"),
        ([*command[:-1], f"{tmp_path}/other", "--dtype", "uint16"], "or check --dtype"),
        ([PREPARE, "--tokenizer", "bytes"], "need --import-tokens"),
        ([PREPARE, "data=stdlib", "--import-tokens", files[0], "--tokenizer", "bytes", "--to", "x"], "no overrides"),
        ([*command, "--dtype", "uint32", "--held-out", "0"], "above 0"),
    ):
        done = forks.run(wrong)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert words in " ".join(done.stderr.split())
