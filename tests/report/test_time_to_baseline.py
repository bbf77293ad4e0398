"""The time to the baseline's final loss, as a share of the baseline's training time."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from depthlm.report.rows import measure_column
from depthlm.report.sweep import with_derived
from depthlm.report.tables import DASH, MISSING

from .made_up import directories, experiment, reported, row, sweep, write_run

OF = experiment(
    points=[
        {"label": name, "model": model} for name, model in (("Vanilla", "vanilla"), ("DCA", "dca"), ("MHC", "mhc"))
    ],
    columns={"time": {"metric": "time_to_baseline", "digits": 2}},
)


def write(directory: str, *validations: tuple[float, float | None], done: float = 1.0) -> None:
    """Write a run with these validations: the seconds before each, and its loss."""
    folder = write_run(directory, done=done)
    rows = [
        {"step": step, "tokens": step, "loss": 3.0, "validation/set/loss": loss, "wall_seconds": seconds}
        for step, (seconds, loss) in enumerate(validations, 1)
    ]
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def times(seeds: Sequence[str] = ()) -> list[float | None]:
    """Return the mean time of each row."""
    swept = sweep(OF, seeds=seeds)
    numbers = [measure_column(row, swept.columns["time"]) for row in swept.rows]
    return [None if number is None else number.mean for number in numbers]


def test_it_is_the_time_of_the_first_validation_with_at_most_the_baselines_last_loss():
    vanilla, dca, mhc = directories(OF)
    write(vanilla, (10, 4.0), (20, 3.5), (30, 3.2), (40, 3.0))
    # slower for a step, and above the loss again later
    write(dca, (15, 3.5), (30, 3.0), (45, 3.1), (60, 2.5))
    write(mhc, (12, 3.9), (24, None), (36, 3.3), (48, 3.01))
    assert times() == [1.0, 0.75, None]
    text = reported(OF)
    assert [row(text, name) for name in ("Vanilla", "DCA", "MHC")] == [["1.00"], ["0.75"], [DASH]]
    assert "no finite number" not in text


def test_incomplete_runs_and_those_without_a_finite_last_loss_of_the_baseline_have_no_time():
    vanilla, dca, mhc = directories(OF)
    write(vanilla, (10, 4.0), (20, 3.5), (30, None))
    write(dca, (10, 3.0), (20, 2.0))
    assert times() == [None, None, None]
    write(vanilla, (10, 4.0), (20, 3.5))
    write(dca, (10, 3.0), done=0.5)
    (Path(dca) / "summary.json").unlink()
    assert times() == [1.0, None, None]
    assert row(reported(OF), "DCA", 1) == [MISSING]
    write(vanilla, (10, 4.0), (20, 3.5), done=0.5)
    write(mhc, (10, 3.0))
    (Path(vanilla) / "summary.json").unlink()
    assert times() == [None, None, None]


def test_without_the_baseline_there_is_no_time(tmp_path):
    for directory in directories(OF)[1:]:
        write(directory, (10, 4.0), (20, 3.5))
    assert times() == [None, None, None]
    swept = sweep(OF)
    others = with_derived(replace(swept, rows=swept.rows[1:]))
    assert [measure_column(row, others.columns["time"]) for row in others.rows] == [None, None]


def test_runs_are_compared_with_the_baseline_of_their_seed_or_with_the_mean_of_all():
    for seed, (loss, seconds) in {"1": (3.0, 40), "2": (2.0, 20)}.items():
        vanilla, dca, _ = directories(OF, seeds=[seed])
        write(vanilla, (10, 4.0), (seconds, loss))
        write(dca, (10, 3.0), (20, 2.0))
    # a seed that the baseline has not: its mean loss is 2.5 after 30 seconds
    write(directories(OF, seeds=["3"])[2], (9, 2.6), (12, 2.5))
    assert times(["1", "2", "3"]) == [1.0, (10 / 40 + 20 / 20) / 2, 12 / 30]
