"""The runs below a folder: which are listed, with which numbers, and which of them match a filter."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from depthlm.errors import UserError
from depthlm.runs.listing import list_runs

from .made_up import root, write_run

__all__ = ["root"]


def test_a_run_is_listed_with_its_state_and_newest_numbers(root):
    runs = list_runs(root)
    assert [
        (run.directory, run.state, run.progress.step, run.tokens, run.loss, run.validation_loss) for run in runs
    ] == [
        ("outputs/default/base", "complete", 20, 9999, 3.25, 2.5),
        ("outputs/default/broken", "failed", 10, 5000, 3.25, None),
        ("outputs/sweep/begun", "stopped", 10, 5000, 3.25, None),
        ("outputs/sweep/new", "waiting", None, None, None, None),
    ]
    assert [run.age for run in runs] == pytest.approx([400_000, 7200, 90, 5], abs=60)


def test_a_run_locked_by_another_process_is_running(root):
    with (root / "sweep/begun/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [run.directory for run in list_runs(root, ["running"])] == ["outputs/sweep/begun"]


def test_a_row_that_is_half_written_is_not_counted_yet(root):
    file = root / "sweep/begun/metrics.jsonl"
    before = file.read_text()
    for half in ('{"step": 20, "lo', '{"step": 20}', "\x00\x00", "{"):
        file.write_text(before + half)
        (run,) = list_runs(root, ["sweep/begun"])
        assert (run.state, run.progress.step, run.loss) == ("stopped", 10, 3.25)


def listed(root: Path, *filters: str) -> list[str]:
    return [run.directory.removeprefix("outputs/") for run in list_runs(root, filters)]


def test_a_run_must_match_every_filter(root):
    for filters, names in {
        "outputs": "",
        "outputs/sweep": "sweep/begun sweep/new",
        "mhc failed": "default/broken",
        "tiny": "sweep/begun",
        "sweep/": "sweep/begun sweep/new",
        "outputs/default/*": "default/base default/broken",
        "complete": "default/base",
        "m*": "default/base default/broken sweep/begun sweep/new",
        "mh": "",
        "mhc complete": "",
    }.items():
        assert listed(root, *filters.split()) == names.split(), filters


def test_folders_that_are_not_runs_and_links_to_folders_are_not_listed(root, tmp_path):
    write_run(root, "sweep/.slurm/0001/code/conf")
    write_run(root, "default/base/wandb/offline-run-1/files")
    write_run(tmp_path / "elsewhere", "linked")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    assert len(list_runs(root)) == 4
    # an ignored name counts only below the root
    write_run(Path("wandb/mine"), "base")
    assert len(list_runs(Path("wandb"))) == 1


def test_a_run_with_a_broken_configuration_is_listed(root):
    for content in (b"", b"- 1", b"model: [", b"\xff\xfe", b"model: mhc\n", b"size: &a {name: b}\nmodel: *a"):
        (root / "sweep/new/config.yaml").write_bytes(content)
        run = list_runs(root)[-1]
        assert (run.directory, run.model, run.size) == ("outputs/sweep/new", "?", "?")


def test_a_comparison_selects_runs_by_any_value(root):
    with (root / "default/base/config.yaml").open("a") as file:
        file.write("optimizer: {lr: 0.001}\ndata: {name: stdlib}\nseed: 1\ndeterministic: false\ninit_from: null\n")
    with (root / "default/broken/config.yaml").open("a") as file:
        file.write("optimizer: {lr: 0.002}\n")
    with (root / "default/broken/metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "tokens": 5000, "loss": 3.25, "grad_norm": 1.5}\n')
    for name, age in (("base", 400_000), ("broken", 7200)):
        for path in (root / "default" / name).iterdir():
            os.utime(path, (time.time() - age,) * 2)
    for filters, names in {
        "model=mhc": "default/broken sweep/begun",
        "model!=mhc": "default/base sweep/new",
        "size=t* state=stopped": "sweep/begun",
        "optimizer.lr=1e-3": "default/base",
        "optimizer.lr>1e-3": "default/broken",
        "optimizer.lr<=0.002": "default/base default/broken",
        "data=stdlib": "default/base",
        "data.name=std*": "default/base",
        "loss<3.3 tokens>=5K": "default/base default/broken sweep/begun",
        "validation_loss<=2.5": "default/base",
        "grad_norm>1": "default/broken",
        "age<2m": "sweep/begun sweep/new",
        "age>1d default": "default/base",
        "deterministic=false": "default/base",
        "init_from=null": "default/base",
        # a flag is no number, and null has no order
        "deterministic=0": "",
        "init_from<1": "",
    }.items():
        assert listed(root, *filters.split()) == names.split(), filters


def test_a_filter_that_cannot_be_right_is_an_error(root):
    with (root / "default/base/config.yaml").open("a") as file:
        file.write("optimizer: {lr: 0.001}\n")
    for text, message in {
        "lr>1": "did you mean `optimizer.lr`?",
        "validaton_loss<3": "did you mean `validation_loss`?",
        "age<2": "s, m, h or d",
        "": "an empty filter",
        "state!=": "nothing to compare state with",
        "<3": "begins with a key",
        "state=complet": "did you mean `complete`?",
        "state!=broken": "allowed: waiting, running, stopped, failed, complete",
    }.items():
        with pytest.raises(UserError) as caught:
            list_runs(root, [text])
        assert message in str(caught.value)
    with pytest.raises(UserError, match=r"(?s)age<2:.*loss<x:"):
        list_runs(root, ["age<2", "loss<x"])
    # a key is no mistake where there is no run to have it
    assert list_runs(root / "default/base/checkpoints", ["optimizer.lr>1"]) == []


def test_runs_are_sorted_by_a_value_and_those_without_it_are_last(root):
    assert [run.directory for run in list_runs(root, sort="tokens")] == [
        "outputs/default/broken", "outputs/sweep/begun", "outputs/default/base", "outputs/sweep/new",
    ]  # fmt: skip
    assert [run.model for run in list_runs(root, sort="model")] == ["mhc", "mhc", "vanilla", "vanilla"]
    with pytest.raises(UserError, match="did you mean `tokens`"):
        list_runs(root, sort="token")
