"""The sweep of a report: the experiment, its rows, and the changes from the command line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from depthlm.config.errors import ConfigError
from depthlm.config.experiment import Column, Experiment
from depthlm.config.keys import on_resume
from depthlm.config.resolve import by_name, experiment_of
from depthlm.config.schema import Config
from depthlm.report.protocol import compose_rows
from depthlm.report.rows import Row, gather
from depthlm.runs.records import RunRecord, read_run
from depthlm.sweeps.points import expand, load_experiment, sweep_points, value_of

# the default columns of an experiment
LOSS = {"loss": Column(title="validation loss", metric="validation_loss", digits=4)}


@dataclass(frozen=True)
class Sweep:
    """An experiment with its rows. columns: never empty; the first is what the figure draws.

    configs: the configuration of each row; rows of one task and optimizer share one. changed: the settings from the
    command line that the experiment's points do not have.
    """

    experiment: Experiment
    rows: list[Row]
    columns: dict[str, Column]
    configs: list[Config]
    changed: list[str]

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all rows."""
        return [run for row in self.rows for run in row.runs]

    @property
    def first(self) -> tuple[str, Column]:
        """The column that the figure draws, by name."""
        return next(iter(self.columns.items()))

    @property
    def as_printed(self) -> bool:
        """Whether the runs follow the paper's whole protocol."""
        return not self.changed and all(config.budget.name == "paper" for config in self.configs)


def title_of(name: str, column: Column) -> str:
    """Return the title of a column."""
    return column.title or name


def read_sweep(
    overrides: Sequence[str], config_dir: str | Path | None = None, read: Callable[[str], RunRecord] = read_run
) -> Sweep:
    """Return the sweep of these overrides, with the record of each run, read by its directory. Raises ConfigError."""
    name = experiment_of(overrides)
    if name is None or "," in name:
        raise ConfigError(
            [f"experiment={name or ''}: a report covers one experiment, like depth_attention/mixing_rule"]
        )
    experiment = load_experiment(name, config_dir)
    rows = gather(sweep_points(overrides, config_dir), read)
    return Sweep(
        experiment,
        rows,
        experiment.columns or LOSS,
        compose_rows(rows, config_dir),
        _changed(overrides, experiment, rows),
    )


def _changed(overrides: Sequence[str], experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """Return the overrides whose values no point of the experiment has."""
    lines = expand(experiment)
    changed = []
    for name, text in by_name(overrides).items():
        if on_resume(name) == "free" or name in ("seed", "budget"):
            continue
        known = [value_of(line.settings[name]) for line in lines if name in line.settings]
        values = {row.settings[name]: None for row in rows if name in row.settings} or {text: None}
        changed += [f"{name}={value}" for value in values if value_of(value) not in known]
    return changed
