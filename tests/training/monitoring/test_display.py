"""The log line of a row of metrics, and the bar of a terminal."""

import io
import re

from rich.console import Console

from depthlm.training.monitoring.display import Bar, row_text

ROW = {"step": 20, "loss": 9.0, "mean_loss": 3.25, "learning_rate": 1e-3, "grad_norm": 1.5, "tokens_per_second": 2048.0,
       "mfu": None, "data_seconds": 0.5}  # fmt: skip


def test_a_line_has_the_means_of_its_interval():
    for changed, text in (
        ({}, "step 20/100  mean loss 3.2500  lr 1.00e-03  grad norm 1.5  2.048K tokens/s  10% waiting for data  "
             "40 s left"),
        ({"mfu": 0.412, "data_seconds": 0.0}, "2.048K tokens/s  mfu 41.2%  40 s left"),
        ({"mean_loss": None, "grad_norm": None}, "mean loss none: no update  lr 1.00e-03  skipped"),
        ({"step": 1, "data_seconds": 0.0}, "2.048K tokens/s"),
    ):  # fmt: skip
        line = row_text(ROW | changed, last=100, steps=10, seconds=5.0)
        assert line.endswith(text) or "skipped" in text
        assert text in line


def drawn(width: int, *, mfu: float | None = 0.412, loss: float | None = 3.0) -> str:
    """Return the last line that a bar draws on a terminal of this width."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=10, color_system=None)
    with Bar(5, 100, 0, 512, lambda speed: mfu, on=console) as bar:
        bar.step(6, 1_200_000, loss, 0.25)
    # without the codes that move the cursor
    lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "\n", console.file.getvalue()).split("\n")
    return next(line.rstrip() for line in reversed(lines) if line.strip())


def test_a_bar_shows_the_numbers_that_are_known_and_fit_on_one_line():
    line = drawn(200)
    for part in ("step 6/100", "smoothed loss 3.0000", "1.2M tokens", "250 ms/step", "2.048K tokens/s", "mfu 41.2%"):
        assert part in line, part
    assert not re.search("mfu|loss|None", drawn(200, mfu=None, loss=None))
    for width in range(40, 160, 9):
        line = drawn(width)
        assert line.startswith("step 6/100")
        assert "smoothed" in line or width < 70
        assert len(line) <= width
