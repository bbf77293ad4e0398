"""The log line of a row of metrics."""

import io
import logging
import re
from dataclasses import replace

import pytest
from rich.console import Console

from depthlm.distributed.launchers import SINGLE_RANK, describe_launch
from depthlm.machine.environment import Threads
from depthlm.runs.records import ValidationLosses
from depthlm.training.monitoring import display
from depthlm.training.monitoring.display import Bar, SmoothMean, row_text, validation_lines

ROW = {"step": 20, "loss": 9.0, "mean_loss": 3.25, "learning_rate": 1e-3, "grad_norm": 1.5, "tokens_per_second": 2048.0,
       "mfu": None, "data_seconds": 0.5}  # fmt: skip


def test_a_line_has_the_means_of_its_interval() -> None:
    for changed, text in (
        ({}, "step 20/100  mean loss 3.2500  lr 1.00e-03  grad norm 1.5  2.048K tokens/s  10% waiting for data  "
             "40 s left"),
        ({"mfu": 0.412, "data_seconds": 0.0}, "2.048K tokens/s  mfu 41.2%  40 s left"),
        ({"mean_loss": None, "grad_norm": None}, "mean loss none: no update  lr 1.00e-03  skipped"),
        ({"step": 100, "data_seconds": 0.0}, "2.048K tokens/s"),
        ({"step": 1, "data_seconds": 0.0}, "2.048K tokens/s"),
    ):  # fmt: skip
        line = row_text(ROW | changed, last=100, steps=10, seconds=5.0)
        assert line.endswith(text) or "skipped" in text
        assert text in line


# a name has at most 60 characters
LONG_RUN = "outputs/attention_residuals/scaling/attention_residuals_recency,size=moda_700m,seed=2,lr=3e-4-1a2b"
LONG_ROW = ROW | {
    "step": 123_456, "mean_loss": 10.123456, "learning_rate": 2.345e-5, "grad_norm": 123.456, "mfu": 0.4123,
    "tokens_per_second": 1_234_567.8,
}  # fmt: skip


def test_no_log_line_of_a_run_wraps_at_120_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(display, "console", screen)
    display.start_logging(0)
    launched = replace(SINGLE_RANK, world_size=1024, nodes=128, launcher="deepspeed", address="gpu-node-01", port=29500)
    sets = dict.fromkeys(("fineweb_edu", "stdlib", "olmo2_mix", "lm1b"), 3.1234)
    messages = [
        *describe_launch(launched, "cuda:0 of gpu-node-0123").split("; "),
        f"forked from {LONG_RUN}",
        str(Threads(16, "the cores that srun bound it to")),
        *(row_text(LONG_ROW | more, last=1_000_000, steps=10, seconds=5.0) for more in ({}, {"data_seconds": 0.0})),
        *validation_lines(ValidationLosses(dict(sets)), {"mechanism/mhc_column_deviation": 1e-5,
                                                         "mechanism/mhc_row_deviation": 1e-7}),
    ]  # fmt: skip
    for message in messages:
        logging.getLogger("depthlm").info("%s", message)
    lines = screen.file.getvalue().splitlines()
    assert [line[9:].rstrip() for line in lines] == messages
    # the least important number gives way
    assert "mfu" not in messages[4]
    assert messages[5].endswith("1.235M tokens/s  5 days 2 h left")


def test_only_losses_have_a_colour_and_a_sample_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard")
    monkeypatch.setattr(display, "console", screen)
    display.start_logging(0)
    log = logging.getLogger("depthlm")
    log.info("step 20/100  mean loss 3.2500  lr 1.00e-03  saved outputs/run/step-00000020")
    log.info("a sample:\nself.loss 3.25 (x)", extra={"highlighter": None})
    first, *others = screen.file.getvalue().splitlines()
    assert re.findall(r"\x1b\[[^m]*3\dm([^\x1b]*)", first) == ["3.2500"]
    assert not re.search(r"\x1b\[[^m]*3\dm", "".join(others))


CODE = re.compile(r"\x1b\[(\?)?([\d;]*)([A-Za-z])")


class Terminal:
    """A terminal that shows logical lines in rows, and wraps them again when its width changes, as most do.

    lines: the logical lines. line, column: of the cursor. It knows the codes that the bar needs.
    """

    def __init__(self, width: int) -> None:
        self.width, self.wraps = width, True
        self.lines, self.line, self.column = [""], 0, 0

    def feed(self, text: str) -> None:
        """Show what was written."""
        while text:
            match = CODE.match(text)
            if match:
                self._code(*match.groups())
            elif text[0] == "\r":
                self.column = self.column // self.width * self.width
            elif text[0] == "\n":
                self._next_row()
            else:
                self._put(text[0])
            text = text[match.end() if match else 1 :]

    def _next_row(self) -> None:
        line, row_end = self.lines[self.line], (self.column // self.width + 1) * self.width
        if len(line) > row_end:
            # the row below belongs to the same line
            self.lines[self.line : self.line + 1] = [line[:row_end], line[row_end:]]
        self.line, self.column = self.line + 1, 0
        self.lines += [""] * (self.line + 1 - len(self.lines))

    def _put(self, character: str) -> None:
        row_end = (self.column // self.width + 1) * self.width
        line = self.lines[self.line].ljust(self.column)
        self.lines[self.line] = line[: self.column] + character + line[self.column + 1 :]
        if self.wraps or self.column + 1 < row_end:
            self.column += 1

    def _code(self, private: str | None, number: str, letter: str) -> None:
        line, row = self.lines[self.line], self.column // self.width * self.width
        if letter == "K":
            assert number == "2"
            self.lines[self.line] = line[:row] + " " * len(line[row : row + self.width]) + line[row + self.width :]
        elif letter == "J":
            assert number in ("", "0")
            self.lines[self.line] = line[: self.column]
            del self.lines[self.line + 1 :]
        elif private and number == "7":
            self.wraps = letter == "h"
        else:
            assert letter in "mhl", f"unknown code {private}{number}{letter}"

    def rows(self) -> list[str]:
        """Return what the screen shows, without empty rows."""
        chunks = [line[at : at + self.width] for line in self.lines for at in range(0, max(len(line), 1), self.width)]
        return [row.rstrip() for row in chunks if row.strip()]


def drawn(width: int, *, mfu: float | None = 0.412, memory: float | None = 1.5, loss: float | None = 3.0) -> str:
    """Return the last line that a bar draws on a terminal of this width."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=10, color_system=None)
    with Bar(5, 100, 0, 512, lambda speed: mfu, on=console) as bar:
        if memory is not None:
            bar.row({"peak_memory_gib": memory})
        bar.step(6, 1_200_000, loss, 0.25)
    terminal = Terminal(width)
    terminal.feed(console.file.getvalue())
    rows = terminal.rows()
    assert len(rows) <= 1
    return "".join(rows)


def test_a_line_shows_the_most_important_numbers_that_are_known_and_fit() -> None:
    line = drawn(200)
    for part in ("step 6/100", "━", "smoothed loss 3.0000", "1.2M tokens", "250 ms/step", "2.048K tokens/s",
                 "mfu 41.2%", "1.50 GiB", "  0 s  ", "left"):  # fmt: skip
        assert part in line, part
    line = drawn(200, mfu=None, memory=None, loss=None)
    assert not re.search("mfu|GiB|loss|None", line)
    assert "2.048K tokens/s" in line
    assert drawn(34).split("  ") == ["step 6/100", "smoothed loss 3.0000"]
    assert "left" in drawn(60)
    for width in range(1, 160, 3):
        assert len(drawn(width)) < width


def test_a_bar_without_a_terminal_and_on_other_ranks_draws_nothing() -> None:
    for rank, terminal in ((0, False), (1, True)):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with Bar(0, 10, rank, 512, on=console) as bar:
            bar.row({"peak_memory_gib": 1.5})
            bar.step(1, 512, 3.0, 0.1)
        assert console.file.getvalue() == ""


def test_a_smooth_mean_weights_the_newest_values_and_has_no_bias() -> None:
    values, decay, mean = [3.0, -7.5, 40.0, 0.25], 0.9, SmoothMean(0.9)
    assert mean.value is None
    for value in values:
        mean.add(value)
    weights = [decay**age for age in (3, 2, 1, 0)]
    expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert mean.value == pytest.approx(expected, abs=1e-9)


def test_a_loss_that_is_not_finite_does_not_spoil_the_mean() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Bar(0, 3, 0, 512, on=console) as bar:
        for step, loss in enumerate((2.0, None, 2.0), 1):
            bar.step(step, 512 * step, loss, 0.1)
    assert "loss 2.0000" in console.file.getvalue()


def test_a_terminal_whose_width_changes_shows_the_bar_once_and_every_log_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=150, height=24, color_system=None)
    terminal, shown = Terminal(150), 0
    with Bar(0, 1000, 0, 512, lambda speed: 0.4, on=console) as bar:
        bar.row({"peak_memory_gib": 1.5})
        for step, width in enumerate((150, 60, 60, 25, 40, 120, 33), 1):
            console.width = terminal.width = width
            bar.step(step, 512 * step, 3.0, 0.25)
            if step % 2:
                console.print(f"logged line {step}")
            bar.progress.refresh()
            terminal.feed(console.file.getvalue()[shown:])
            shown = len(console.file.getvalue())
            rows = terminal.rows()
            assert [row.startswith("step ") for row in rows] == [False] * (len(rows) - 1) + [True], rows
            assert len(rows[-1]) < width
    assert rows[:-1] == [f"logged line {step}" for step in (1, 3, 5, 7)]
