"""The progress bar of training: one line, never longer than the terminal is wide."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import Progress, Task
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment

from depthlm.counts import count_text
from depthlm.training.monitoring.display import console, number_text, step_time_text

# the weight of all earlier steps in the exponential means: the loss over about 50 steps, the time over about 10
LOSS_DECAY, TIME_DECAY = 0.98, 0.9
SHORTEST, LONGEST = 8, 40
# which parts a narrow terminal keeps, the most important ones first
IMPORTANCE = ("step", "loss", "remaining", "speed", "time", "tokens", "mfu", "memory", "elapsed")


class SmoothMean:
    """An exponential mean whose bias towards its start at 0 is removed, as in Adam. value: None before the first."""

    def __init__(self, decay: float) -> None:
        self.decay, self.weight, self.total = decay, 0.0, 0.0

    def add(self, value: float) -> None:
        """Add the value of a step."""
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + (1 - self.decay)

    @property
    def value(self) -> float | None:
        """The mean so far."""
        return self.total / self.weight if self.weight else None


class Bar:
    """A progress bar with the mean loss, the speed, the memory and the remaining time; disabled without a terminal.

    Its means begin with this process: a resumed run begins with the loss of its first step.
    """

    def __init__(
        self,
        completed: int,
        last: int,
        rank: int,
        tokens_per_step: int = 0,
        mfu: Callable[[float], float | None] = lambda tokens_per_second: None,
        *,
        on: Console = console,
    ) -> None:
        """completed, last: steps. mfu: the model FLOPs utilization at a speed in tokens/s. on: where it is drawn."""
        self.enabled = rank == 0 and on.is_terminal
        self.progress = _OneLine(console=on, disable=not self.enabled)
        self.task = self.progress.add_task("train", total=last, completed=completed, parts={})
        self.loss, self.seconds = SmoothMean(LOSS_DECAY), SmoothMean(TIME_DECAY)
        self.tokens_per_step, self.mfu = tokens_per_step, mfu
        self.memory: float | None = None

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def step(self, step: int, tokens: int, loss: float | None, seconds: float) -> None:
        """Show a completed step: the tokens so far, its loss (None if it is not finite), and the seconds it took."""
        if not self.enabled:
            return
        if loss is not None:
            self.loss.add(loss)
        self.seconds.add(seconds)
        self.progress.update(self.task, completed=step, parts=self._parts(tokens))

    def row(self, row: dict[str, Any]) -> None:
        """Show the memory of a row of metrics: the peak of the GPU's allocator, or of this process on a CPU."""
        self.memory = row["peak_memory_gib"]

    def _parts(self, tokens: int) -> dict[str, str]:
        seconds = self.seconds.value or 0.0
        parts = {"tokens": f"{count_text(tokens)} tokens", "time": step_time_text(seconds)}
        if self.loss.value is not None:
            parts["loss"] = f"loss {number_text(self.loss.value)}"
        if seconds > 0:
            speed = self.tokens_per_step / seconds
            parts["speed"] = f"{speed:,.0f} tokens/s"
            if (mfu := self.mfu(speed)) is not None:
                parts["mfu"] = f"mfu {mfu:.1%}"
        if self.memory is not None:
            parts["memory"] = f"{self.memory:.2f} GiB"
        return parts


class _OneLine(Progress):
    """Rich's progress display, which estimates the remaining time and redraws itself ten times per second."""

    def get_renderable(self) -> "_Line":
        return _Line(self.tasks[0] if self.tasks else None)


class _Line:
    """The bar and the parts of a task that fit into the width of the console, measured when they are drawn."""

    def __init__(self, task: Task | None) -> None:
        self.task = task

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A terminal that becomes narrower wraps the line that it shows. The cursor stays at the start of the line, so
        # that it then is at the first of the wrapped rows, and the next drawing erases all of them. Without automatic
        # wrapping, a line that was measured just before the change is cut off instead.
        yield _control("\x1b[J\x1b[?7l")
        if self.task is not None:
            # a line as wide as the terminal would wrap in some of them
            yield from _fitting(self.task, console, options, options.max_width - 1)
        yield _control("\x1b[?7h\r")


def _control(codes: str) -> Segment:
    # Rich neither counts nor cuts the codes of a segment that has the last argument, which nothing else reads
    return Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])


def _fitting(task: Task, console: Console, options: ConsoleOptions, width: int) -> RenderResult:
    step, last = int(task.completed), int(task.total or 0)
    texts = {
        "step": f"step {step}/{last}",
        **task.fields["parts"],
        "elapsed": _clock(task.finished_time if task.finished else task.elapsed),
        "remaining": f"{_clock(task.time_remaining)} left",
    }
    kept, used = set(), 0
    for name in IMPORTANCE:
        length = cell_len(texts[name]) + 2 if name in texts else 0
        if used + length > width + 2:
            break
        kept.add(name)
        used += length
    order = ("step", "loss", "tokens", "time", "speed", "mfu", "memory", "elapsed", "remaining")
    first, *others = [texts[name] for name in order if name in kept and name in texts] or [texts["step"]]
    yield Segment(first[: max(0, width)])
    if (room := min(LONGEST, width - used)) >= SHORTEST:
        yield Segment("  ")
        bar = ProgressBar(total=max(last, 1), completed=step, width=room)
        yield from bar.__rich_console__(console, options.update(width=room))
    for text in others:
        yield Segment(f"  {text}")


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
