"""The content of an experiment's report: tables, states, protocol."""

import json
from pathlib import Path

import pytest

from depthlm.report.tables import DASH, MISSING

from .made_up import directories, experiment, is_png, reported, row, write_run

POINTS = [
    {"label": "Vanilla", "model": "vanilla", "paper": {"loss": 2.2348}},
    {"label": "Uniform | Mix", "model": "uniform_mix", "paper": {"loss": None}},
    {"label": "Depth-Attention", "model": "depth_attention", "paper": {"loss": 2.2115}},
]
COLUMNS = {"loss": {"title": "validation loss", "metric": "validation_loss", "digits": 4}}


RULE = experiment(
    title="A rule",
    source="A paper, Table 5",
    points=POINTS,
    columns=COLUMNS,
    figure="bars",
    assumed=["a cosine"],
    notes=["a note_ of *ours*"],
)


@pytest.mark.usefixtures("rendered")
def test_the_report_has_our_numbers_the_papers_and_differences_against_the_baseline():
    for directory, loss in zip(directories(RULE, "smoke"), (3.0, 2.9, 2.95), strict=True):
        write_run(directory, loss)
    text = reported(RULE, "smoke")
    assert row(text, "Vanilla") == ["3.0000", "2.2348"]
    assert row(text, "Uniform \\| Mix") == ["2.9000", DASH]
    assert row(text, "Depth-Attention") == ["2.9500", "2.2115"]
    assert "**validation loss, against Vanilla**" in text
    assert row(text, "Depth-Attention", 1) == ["-0.0500", "-0.0233"]
    assert row(text, "Uniform \\| Mix", 1) == ["-0.1000", DASH]
    assert text.startswith("# A rule\n\nSource: A paper, Table 5.")
    assert "3 runs: 3 complete." in text
    assert "- a note\\_ of \\*ours\\*" in text
    assert "| budget             | smoke" in text
    assert "not comparable with the paper's in absolute value" in text
    assert is_png("bars.png")
    assert is_png("loss_curves.png")


def test_runs_of_the_papers_protocol_are_compared_with_its_numbers():
    for directory, loss in zip(directories(RULE), (3.0, 2.9, 2.95), strict=True):
        write_run(directory, loss)
    # a loss that is not finite gives no number
    write_run(directories(RULE)[2], validation_loss=None)
    text = reported(RULE)
    assert row(text, "Vanilla") == ["3.0000", "2.2348", "+0.7652"]
    assert row(text, "Uniform \\| Mix") == ["2.9000", DASH, DASH]
    assert row(text, "Depth-Attention") == [DASH, "2.2115", DASH]


def test_a_half_finished_sweep_reports_the_progress_of_each_run():
    rule = directories(RULE, "smoke")
    write_run(rule[0], 3.0)
    write_run(rule[1], 2.9, done=0.5)
    write_run(rule[2], 2.9, done=0.25, failure="OutOfMemoryError: 3 | 4 GiB\nmore")
    text = reported(RULE, "smoke")
    assert "3 runs: 1 complete, 1 stopped, 1 failed." in text
    assert row(text, "Depth-Attention") == [MISSING, "2.2115"]
    assert row(text, "Depth-Attention", 1) == [MISSING, "-0.0233"]
    assert row(text, "Uniform \\| Mix", 2)[:2] == ["stopped", "20"]
    assert row(text, "Depth-Attention", 2)[0] == "failed: OutOfMemoryError: 3 \\| 4 GiB"
    assert "pale lines that end in a cross" in text


def test_several_seeds_are_reported_with_their_count_and_deviation():
    for number, directory in enumerate(directories(RULE, "smoke", ["1", "2"])):
        # the last run of the second seed is incomplete
        gain = 0.05 + 0.002 * (number // 3)
        write_run(directory, 3.0 + 0.1 * (number // 3) - gain * (number % 3), done=0.5 if number == 5 else 1)
    text = reported(RULE, "smoke", ["1", "2"])
    assert row(text, "Vanilla") == ["2", "3.0500 ± 0.0707", "2.2348"]
    assert row(text, "Depth-Attention") == ["2", "2.9000 (1 of 2)", "2.2115"]
    assert row(text, "Depth-Attention, seed 2")[:2] == ["stopped", "20"]
    # of the differences -0.050 and -0.052; Student's t of one degree of freedom is 12.706
    assert row(text, "Uniform \\| Mix", 1) == ["-0.0510 \\[-0.0637, -0.0383\\]", DASH]
    assert "In brackets: the 95% interval over seeds" in text
    assert "Error bars: 95% intervals over seeds, of differences paired by seed." in text


def test_the_average_perplexity_is_over_the_validation_sets_of_the_other_columns():
    names = ("validation/a/", "validation/b/", "validation_", "validation/average_")
    metrics = [f"{name}perplexity" for name in names]
    columns = {str(number): {"metric": metric, "digits": 2} for number, metric in enumerate(metrics)}
    of = experiment(points=[{**point, "paper": {}} for point in POINTS], columns=columns)
    vanilla, mix, attention = directories(of)
    # a set that no column has, such as that of a training source, does not count
    other = {"validation/c/perplexity": 900.0, "validation_perplexity": 5.0}
    write_run(vanilla, **{metrics[0]: 10.0, metrics[1]: 30.0}, **other)
    write_run(mix, **{metrics[0]: 10.0}, **other)
    # what `depthlm evaluate` measures has no part where the training of a run has it
    write_run(attention, **{metrics[0]: 8.0, metrics[1]: 10.0}, **other)
    (Path(attention) / "evaluation.json").write_text(json.dumps({"step": 40, metrics[0]: 1.0}))
    text = reported(of)
    assert row(text, "Vanilla") == ["10.00", "30.00", "5.00", "20.00"]
    assert row(text, "Uniform \\| Mix") == ["10.00", DASH, "5.00", DASH]
    assert row(text, "Depth-Attention") == ["8.00", "10.00", "5.00", "9.00"]


def test_the_best_is_marked_for_each_size_separately_where_seeds_separate_it():
    points = [{"label": label, "model": label, "size": ["micro", "tiny"]} for label in ("vanilla", "dca")]
    of = experiment(points=points, columns=COLUMNS)
    losses = (3.0, 2.5, 3.1, 2.4, 3.2, 2.7, 3.31, 2.59)
    for directory, loss in zip(directories(of, seeds=["1", "2"]), losses, strict=True):
        write_run(directory, loss)
    text = reported(of, seeds=["1", "2"])
    assert [row(text, f"{model}, {size}")[1] for model in ("vanilla", "dca") for size in ("micro", "tiny")] == [
        "**3.1000 ± 0.1414**", "2.6000 ± 0.1414", "3.2050 ± 0.1485", "**2.4950 ± 0.1344**",
    ]  # fmt: skip
    assert row(text, "dca, tiny", 1) == ["vanilla, tiny", "-0.1050 \\[-0.1265, -0.0835\\]"]


def test_a_run_with_another_protocol_is_reported():
    write_run(directories(RULE)[0], config={"optimizer": {"lr": 0.5}, "training": {"log_every": 999}})
    text = reported(RULE)
    assert "- Vanilla: optimizer.lr: 0.5, not 0.003" in text
    assert "log_every" not in text
    # assumptions that a budget replaces are omitted
    assert "- a cosine" in text
    assert "- a cosine" not in reported(RULE, "smoke")


def test_the_validation_loss_stands_in_for_metrics_that_no_run_has():
    columns = {"piqa": {"title": "PIQA", "metric": "zero_shot/piqa", "better": "higher", "group": "tasks"}}
    points = [{"label": label, "model": label, "paper": {"piqa": 70.0}} for label in ("vanilla", "dca")]
    of = experiment(points=points, columns=columns, figure="bars")
    assert "stands in for them" not in reported(of, "smoke")
    for directory, loss in zip(directories(of, "smoke"), (3.0, 2.9), strict=True):
        write_run(directory, loss)
    text = reported(of, "smoke")
    assert "The validation loss stands in for them, and the figure shows it." in text
    assert row(text, "dca") == ["2.9000"]
    assert row(text, "dca", 1) == [DASH, "70.000"]
    write_run(directories(of, "smoke")[0], **{"zero_shot/piqa": 0.5})
    assert "stands in for them" not in reported(of, "smoke")
