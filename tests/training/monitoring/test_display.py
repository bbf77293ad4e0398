"""The log line of a row of metrics."""

from typing import Any

import pytest

from depthlm.training.monitoring.display import row_text, step_time_text

ROW = {"step": 20, "loss": 9.0, "mean_loss": 3.25, "learning_rate": 1e-3, "grad_norm": 1.5, "tokens_per_second": 2048.0,
       "mfu": None, "data_seconds": 0.5}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "step 20/100  mean loss 3.2500  lr 1.00e-03  grad norm 1.500  2,048 tokens/s  "
             "500 ms/step (10.0% waiting for data)"),
        ({"mfu": 0.412}, "waiting for data)  mfu 41.2%"),
        ({"mean_loss": None, "grad_norm": None}, "mean loss none: no update  lr 1.00e-03  skipped"),
    ],
)  # fmt: skip
def test_a_line_has_the_means_of_its_interval(changed: dict[str, Any], text: str) -> None:
    assert text in row_text(ROW | changed, last=100, steps=10, seconds=5.0)


def test_a_short_step_has_a_decimal() -> None:
    assert [step_time_text(seconds) for seconds in (0.0025, 0.25, 12.0)] == [
        "2.5 ms/step", "250 ms/step", "12,000 ms/step",
    ]  # fmt: skip
