"""A point of a sweep: one run, and what a comparison needs to know about it."""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from depthlm.config.compose import compose_unchecked
from depthlm.config.hydra_context import value_text
from depthlm.config.keys import replace_values
from depthlm.config.names import mechanism_name, normal_value
from depthlm.config.saved import load_config
from depthlm.config.schema import Config
from depthlm.errors import UserError

# overrides that name the run, or folder, that a point starts from
STARTS = ("init_from=", "fork_from=")
# groups whose settings define the task: points that differ in them are not compared
TASK_GROUPS = ("size", "data", "training", "backbone", "budget")


@dataclass(frozen=True)
class Point:
    """One run of a sweep: `python train.py <overrides>`, and what a comparison needs to know about it.

    settings: those of the experiment's point and of the command line. parts: of its label, by the key that each is
    from. paper: the paper's numbers, by column. follows: whether it starts from the checkpoint of another point.
    default_seed: that of the experiment's file. spreads: those printed beside the paper's numbers.
    best_over: the setting whose value the runs of the sweep choose; empty: none. selects: whether this run chooses.
    """

    overrides: list[str]
    settings: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    paper: dict[str, float | None] = field(default_factory=dict)
    follows: bool = False
    config_dir: str | Path | None = None
    default_seed: str = "1"
    spreads: dict[str, float] = field(default_factory=dict)
    best_over: str = ""
    selects: bool = False

    @property
    def label(self) -> str:
        """The label in a table of all points, such as `mhc, micro` or `mhc, lr 1e-3`, without the seed."""
        return ", ".join(self.parts.values())

    @property
    def seed(self) -> str | None:
        """The seed; None where the settings do not have it."""
        return self.settings.get("seed")

    @property
    def mechanism(self) -> str:
        """The name of the mechanism: a preset, or the parts that replace those of vanilla."""
        parts = [f"{name}={value}" for name, value in self.settings.items() if name.startswith("model/")]
        return mechanism_name(self.settings.get("model", "vanilla"), parts)

    @property
    def task(self) -> dict[str, str]:
        """What the point is compared at: the task that the experiment's file names, or the settings that define it."""
        if "task" in self.parts:
            return {"task": self.parts["task"]}
        return {
            name: value
            for name, value in self.settings.items()
            if name.replace("/", ".").partition(".")[0] in TASK_GROUPS
        }

    @cached_property
    def config(self) -> Config:
        """The configuration, which `check_points` checks. precision=auto stays auto: the run's machine decides."""
        return compose_unchecked(self.overrides, self.config_dir)

    def config_elsewhere(self) -> Config:
        """Return the configuration on another machine: precision=auto is that of its run, or bf16 without a run."""
        if self.config.precision.name != "auto":
            return self.config
        precision = "bf16"
        with suppress(UserError):
            precision = load_config(Path(self.directory)).precision.name
        return replace_values(self.config, {"precision.name": precision})

    @property
    def directory(self) -> str:
        """The run directory."""
        return str(self.config.output_dir)

    @property
    def starts(self) -> list[str]:
        """The runs, or folders, that the point starts from."""
        given = (text.partition("=") for text in self.overrides if text.startswith(STARTS))
        return [normal_value(name, value) for name, _, value in given]

    def checkable(self) -> list[str]:
        """Return the overrides without the run it starts from, which need not exist before the sweep."""
        if not self.follows:
            return self.overrides
        kept = [text for text in self.overrides if not text.startswith((*STARTS, "output_dir="))]
        return [*kept, f"output_dir={value_text('output_dir', self.directory)}"]
