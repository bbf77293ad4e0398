"""The command that prepares a corpus."""

from pathlib import Path

from ..forks import Forks

PREPARE = "data/prepare.py"


def test_a_corpus_is_prepared_once_and_summarised(corpus_folder: Path, tmp_path: Path, forks: Forks) -> None:
    overrides = ["data=local", f"data.source={corpus_folder}", "data.tokenizer=bytes", f"data.path={tmp_path}/tokens"]
    for _ in range(2):
        done = forks.run([PREPARE, *overrides])
        assert done.returncode == 0, done.stderr
        assert "21,012" in done.stdout
    assert (tmp_path / "tokens/manifest.json").exists()


def test_a_user_error_exits_with_2_and_without_a_traceback(tmp_path: Path, forks: Forks) -> None:
    for overrides in (["data=local"], ["data=local", f"data.source={tmp_path}"], ["data=locl"]):
        done = forks.run([PREPARE, *overrides])
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
