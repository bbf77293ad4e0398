"""Whatever a crash leaves of a conversion for another number of ranks, the run resumes from the checkpoint before."""

from collections.abc import Callable
from pathlib import Path

import pytest

from depthlm.run_directory import RunDirectory

from ...crashes import Recorder
from ...two_ranks import TwoRanks, train_on_ranks
from ..run_files import assert_same, states, weights
from .crash_states import SMALL, failures, train_converting_here, train_recorded

SAVED = 2


@pytest.mark.slow
@pytest.mark.parametrize("before", [2, 1])
def test_a_crash_while_a_checkpoint_is_converted_loses_nothing_that_was_saved(
    two_ranks: TwoRanks, small_run: Callable[..., list[str]], tmp_path: Path, before: int
) -> None:
    root, resumed, converting = tmp_path / "root", [], []

    def on(ranks: int, function: Callable[..., int | str], overrides: list[str], *more: Path) -> None:
        codes = two_ranks(function, overrides, *more) if ranks == 2 else [function(overrides, *more)]
        assert codes == [0] * ranks

    def run(folder: Path, stop: int = SAVED + 1) -> list[str]:
        return small_run(*SMALL, "deepspeed=zero1", f"training.stop_after={stop}", f"output_dir={folder}/run")

    on(before, train_on_ranks, run(root, SAVED))
    Recorder(root, tmp_path / "events").settle()
    on(3 - before, train_recorded, run(root), root)
    assert "converting" in (root / "run/train.log").read_text()

    def check(folder: Path) -> None:
        paths = RunDirectory(folder / "run")
        unconverted = [path for path in paths.leftovers() if path.name.startswith(".universal")]
        converting.extend(unconverted)
        number = int(folder.name.split()[1])
        if number % 83 == 0:
            on(3 - before, train_converting_here, run(folder))
            assert_same(weights(folder / "run"), weights(root / "run"))
            assert_same(states(folder / "run"), states(root / "run"))
            assert not paths.leftovers()
            resumed.append(bool(unconverted))

    count, found = failures(root, tmp_path, check, saved=SAVED, most=8)
    print(f"{count} states, {len(converting)} with a conversion, {len(resumed)} resumed, {sum(resumed)} of those")
    assert found == []
    assert count > 400
    assert len(converting) > 200
    assert sum(resumed) > 2
