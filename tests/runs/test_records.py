"""Reading the record of a run directory, also if its files are missing or damaged."""

import fcntl
import json
import math
from pathlib import Path
from typing import Any

import pytest

from depthlm.runs.records import (
    COMPLETE,
    FAILED,
    RUNNING,
    STOPPED,
    WAITING,
    RunRecord,
    differing_texts,
    interval_losses,
    read_run,
    with_one_source,
)
from depthlm.sweeps import Point
from depthlm.sweeps.table import print_points

WRONG: list[Any] = ["2.5", [2.5], True, 10**400]
SUMMARY = {"steps": 100, "validation_loss": 2.5, "parameters": 10, "mfu": None}


def write(folder: Path, rows: int = 0, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": 5 - step / 100}) for step in range(1, rows + 1)]
    if rows:
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_state_of_a_run_follows_from_its_files(tmp_path):
    assert read_run(tmp_path / "none").state == WAITING
    run = write(tmp_path / "run", rows=3)
    assert (read_run(run).state, read_run(run).step, read_run(run).loss) == (STOPPED, 3, 4.97)
    write(run, failure={"error": "a disk is full"})
    assert (read_run(run).state, read_run(run).failure) == (FAILED, "a disk is full")
    with (run / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_run(run).state == RUNNING
    write(run, summary=SUMMARY)
    assert read_run(run).state == COMPLETE


def test_only_a_complete_run_has_numbers_and_only_finite_ones_count(tmp_path):
    run = write(tmp_path, rows=100, evaluation={"step": 100, "zero_shot/piqa": 0.7})
    assert read_run(run).number("validation_loss") is None
    write(run, summary=SUMMARY)
    record = read_run(run)
    assert record.number("validation_loss") == 2.5
    assert record.number("zero_shot/piqa") == 0.7
    assert record.number("mfu") is None
    assert record.number("no such number") is None
    assert record.number("training_perplexity") == pytest.approx(54.598, rel=1e-3)
    assert record.number("validation_loss", at=0.5) is None


def test_what_training_measured_takes_precedence_over_an_evaluation_of_the_last_checkpoint(tmp_path):
    name = "validation/stdlib/loss"
    run = write(tmp_path, summary=SUMMARY | {name: 2.5}, evaluation={"step": 100, name: 2.6, "zero_shot/piqa": 0.7})
    assert (read_run(run).number(name), read_run(run).number("zero_shot/piqa")) == (2.5, 0.7)
    # an evaluation from before the run was extended, and one that does not say of which checkpoint it is
    for step in ({"step": 50}, {}):
        write(run, evaluation={**step, name: 2.9, "zero_shot/piqa": 0.6})
        assert (read_run(run).number(name), read_run(run).number("zero_shot/piqa")) == (2.5, None)


def test_a_metric_of_a_comparison_is_read_from_the_same_file_of_all_runs(tmp_path):
    name, other = "validation/a/loss", "zero_shot/piqa"
    trained = write(tmp_path / "trained", summary=SUMMARY | {name: 2.5})
    evaluated = write(tmp_path / "evaluated", summary=SUMMARY, evaluation={"step": 100, name: 2.1, other: 0.7})
    runs = with_one_source([read_run(trained), read_run(evaluated)])
    assert [run.number(name) for run in runs] == [2.5, None]
    assert [run.number(other) for run in runs] == [None, 0.7]
    # evaluations cover whole sets, and count where all complete runs have them
    write(tmp_path / "trained", evaluation={"step": 100, name: 2.4})
    stopped = read_run(write(tmp_path / "stopped", rows=3))
    runs = with_one_source([read_run(trained), read_run(evaluated), stopped])
    assert [run.number(name) for run in runs] == [2.4, 2.1, None]
    # without a run whose training has it, all are evaluations
    assert with_one_source([read_run(evaluated)])[0].number(name) == 2.1


def test_a_number_that_is_not_finite_is_a_result_and_damage_is_none(tmp_path):
    for value, result in ((2.5, 2.5), (None, math.inf), (math.nan, math.inf), *((wrong, None) for wrong in WRONG)):
        run = read_run(write(tmp_path, summary=SUMMARY | {"validation_loss": value, "validation/a/text": "0a, 5"}))
        assert (run.state, run.result("validation_loss"), run.result("none")) == (COMPLETE, result, None)
        assert (run.damage is not None) == (result is None)
        assert run.damage is None or run.damage.endswith("summary.json: validation_loss is not a number")


def test_validation_sets_of_one_name_and_other_text_are_named(tmp_path):
    def run(name: str, **texts: str | None) -> RunRecord:
        sets = {f"validation/{key}/loss": 2.5 for key in texts}
        known = {f"validation/{key}/text": text for key, text in texts.items() if text is not None}
        return read_run(write(tmp_path / name, summary=SUMMARY | sets | known))

    runs = [run("1", a="0a, 5 tokens", b="0b, 5 tokens"), run("2", a="0a, 5 tokens", b="0b, 4 tokens")]
    assert differing_texts(runs) == ["b"]
    # the loss of training, on its own text, is compared also where all runs were evaluated on one
    for number in ("1", "2"):
        evaluation = {"step": 100, "validation/b/loss": 2.4, "validation/b/text": "0b, 6 tokens"}
        write(tmp_path / number, evaluation=evaluation)
    runs = with_one_source([read_run(tmp_path / number) for number in ("1", "2")])
    assert [run.number("validation/b/loss") for run in runs] == [2.4, 2.4]
    assert differing_texts(runs) == ["b"]
    # a run of an earlier version does not say what its text was
    runs = [run("3", a="0a, 5 tokens"), run("4", a=None), run("5", a=None, c="0c, 1 tokens")]
    assert (differing_texts(runs), differing_texts(runs, every_set=True)) == ([], ["c"])


def test_a_number_before_the_end_is_that_of_the_nearest_validation(tmp_path):
    run = write(tmp_path, summary=SUMMARY)
    rows = [{"step": step, "loss": 3.0, "validation/a/loss": 2.0 + step / 100} for step in (30, 60, 90)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(run).number("validation_loss", at=0.33) == pytest.approx(2.3)
    assert read_run(run).number("validation_loss", at=0.45) is None


def test_damaged_files_affect_only_their_own_numbers(tmp_path, capsys):
    broken, valid = write(tmp_path / "broken"), write(tmp_path / "valid", rows=100, summary=SUMMARY)
    for damage in (b"\xff\xfe{", b'{"loss": 2}\n', b"[1, 2]\n", b"nonsense", b""):
        for name in ("metrics.jsonl", "summary.json", "evaluation.json", "failure.json"):
            (broken / name).write_bytes(damage)
        record = read_run(broken)
        assert (record.step, record.number("validation_loss")) == (None, None)
        assert record.damage == f"{broken}/summary.json: no object with a number of `steps`"
        print_points([Point([f"output_dir={path}"], parts={"label": path.name}) for path in (broken, valid)])
        assert "2.5000" in capsys.readouterr().out


def logged(*rows: tuple[int, float | None, int | None]) -> list[dict[str, Any]]:
    """Rows of a step, its mean loss and the number of updates in the mean."""
    return [
        {"step": step, "tokens": 100 * step, "mean_loss": loss, "interval_updates": updates}
        for step, loss, updates in rows
    ]


@pytest.mark.parametrize(
    ("rows", "points"),
    [
        # the mean at step 30 is over ten updates, those before a stop at step 22 included
        (
            logged((1, 9.0, 1), (10, 4.0, 9), (20, 4.0, 10), (22, 7.0, 2), (30, 2.0, 10)),
            [(50, 9.0), (550, 4.0), (1500, 4.0), (2100, 7.0), (2500, 2.0)],
        ),
        # no update in an interval
        (logged((10, 5.0, 10), (20, None, 0), (30, 3.0, 10)), [(500, 5.0), (2000, None), (2500, 3.0)]),
        # a fork at step 1000
        (logged((1010, 5.0, 10), (1020, 4.0, 10)), [(100_500, 5.0), (101_500, 4.0)]),
    ],
)
def test_a_point_of_a_loss_curve_is_in_the_middle_of_its_updates(rows, points):
    assert interval_losses(rows) == [(pytest.approx(tokens), loss) for tokens, loss in points]
