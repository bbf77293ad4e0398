"""The points of a sweep, as `train.py -m`, slurm/submit.py and `depthlm report` derive them from overrides."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.markup import escape

from depthlm.config.compose import compose
from depthlm.config.errors import ConfigError, listed, nearest
from depthlm.config.experiment import Experiment
from depthlm.config.from_run import run_of
from depthlm.config.hydra_context import compose_raw, hydra_at_conf
from depthlm.config.keys import check_fields, override_text
from depthlm.config.names import (
    DEFAULTS,
    Leading,
    by_name,
    experiment_of,
    importance,
    mechanism_name,
    setting_texts,
)
from depthlm.config.resolve import leading, run_directory
from depthlm.config.schema import Config
from depthlm.config.validate.explain import explain_overrides
from depthlm.console import stdout_console
from depthlm.runs.progress import failure_text, progress_of, progress_table, total_hours
from depthlm.runs.records import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, finite, read_run

# overrides that name the run, or folder, that a point starts from
STARTS = ("init_from=", "fork_from=")

Compose = Callable[[Sequence[str], str | Path | None], Config]
# keys of a point in an experiment's file that are not settings
NAMES = ("label", "task", "paper")
# of the states of a run in a table, for rich
STYLES = {WAITING: "dim", RUNNING: "cyan", STOPPED: "yellow", FAILED: "red", COMPLETE: "green"}
# groups whose settings define the task: points that differ in them are not compared
TASK_GROUPS = ("size", "data", "training", "backbone", "budget")


@dataclass(frozen=True)
class Point:
    """One run of a sweep: `python train.py <overrides>`, and what a comparison needs to know about it.

    settings: those of the experiment's point and of the command line. parts: of its label, by the key that each is
    from. paper: the paper's numbers, by column. follows: whether it starts from the checkpoint of another point.
    defaults: mechanism, size and seed of the experiment's file. spreads: those printed beside the paper's numbers.
    """

    overrides: list[str]
    settings: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    paper: dict[str, float | None] = field(default_factory=dict)
    follows: bool = False
    config_dir: str | Path | None = None
    defaults: Leading = DEFAULTS
    spreads: dict[str, float] = field(default_factory=dict)

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
    def directory(self) -> str:
        """The run directory."""
        if not {"output_dir", "name"} & by_name(self.overrides).keys():
            return run_directory(self.overrides, self.defaults, config_dir=self.config_dir)
        with hydra_at_conf():
            raw = compose_raw(self.overrides, self.config_dir)
        return str(raw.output_dir or run_directory(self.overrides, self.defaults, raw.name, self.config_dir))

    def checkable(self) -> list[str]:
        """Return the overrides without the run it starts from, which need not exist before the sweep."""
        if not self.follows:
            return self.overrides
        kept = [text for text in self.overrides if not text.startswith((*STARTS, "output_dir="))]
        return [*kept, f"output_dir={self.directory}"]


def sweep_points(overrides: Sequence[str], config_dir: str | Path | None = None) -> list[Point]:
    """Return every point: the product of all `key=a,b` axes, times the points of the experiment.

    An override of a setting of the experiment's points selects the points with that value. If no point has it, the
    override replaces the value in all points, and the paper's numbers no longer apply.

    Raises ConfigError if the points of the experiment are invalid.
    """
    unique_points: dict[tuple[str, ...], Point] = {}
    with hydra_at_conf():
        for combination in _product(overrides):
            name = experiment_of(combination)
            points = [] if name is None else _experiment_points(combination, name, config_dir)
            for point in points or [Point(combination, by_name(combination), config_dir=config_dir)]:
                unique_points.setdefault(tuple(sorted(point.overrides)), point)
    points = list(unique_points.values())
    return points if any(point.parts for point in points) else _named(points)


def _named(points: list[Point]) -> list[Point]:
    """Return points without an experiment, named by the settings that vary in the sweep."""
    names = {name: None for point in points for name in point.settings if name not in ("seed", "output_dir", "name")}
    varying = [name for name in names if len({point.settings.get(name) for point in points}) > 1]
    texts = {
        name: setting_texts(name, [point.settings[name] for point in points if name in point.settings])
        for name in sorted(varying, key=importance)
        if name != "model" and not name.startswith("model/")
    }
    # a mechanism is a preset, or the parts that replace those of one
    has_mechanism = len({point.mechanism for point in points}) > 1 or not texts
    return [
        replace(
            point,
            parts=({"model": point.mechanism} if has_mechanism else {})
            | {name: by_value[point.settings[name]] for name, by_value in texts.items() if name in point.settings},
        )
        for point in points
    ]


def check_points(
    overrides: Sequence[str], config_dir: str | Path | None = None, composed: Compose = compose
) -> list[Point]:
    """Return the points after checking each of them. Raises ConfigError with the mistakes in all points.

    composed: `compose_anywhere` for points that are to run on other machines.
    """
    if run_of(overrides) is not None:
        raise ConfigError(["run=: resumes or varies one run; define a sweep by its overrides or by experiment="])
    points = sweep_points(overrides, config_dir)
    errors = [] if points else [_no_points(overrides)]
    directories: set[str | None] = set()
    for point in points:
        try:
            directory = composed(point.checkable(), config_dir).output_dir
        except ConfigError as error:
            errors.extend(error.errors)
            continue
        if directory != point.directory:
            errors.append(f"output_dir={directory}: give it on the command line; a sweep does not read it from a file")
        if directory in directories:
            errors.append(
                f"output_dir={directory}: several points of the sweep would write there; interpolate the settings that "
                "differ, as in name='${model.name}-${seed}' or output_dir='outputs/mine/${model.name}-${seed}'"
            )
        directories.add(directory)
    if errors:
        raise ConfigError(errors)
    return points


def _no_points(overrides: Sequence[str]) -> str:
    """Return why the product of the axes is empty."""
    with hydra_at_conf():
        empty = [text for text in overrides if not any(_product([text]))]
    return f"{', '.join(empty)}: gives no value, so the sweep has no points; glob() selects options of a group"


def load_experiment(name: str, config_dir: str | Path | None = None) -> Experiment:
    """Return the experiment of this name. Raises ConfigError if it does not exist or its file is invalid."""
    return replace(_load_experiment(name, config_dir).experiment, name=name)


def _load_experiment(name: str, config_dir: str | Path | None) -> Config:
    with hydra_at_conf():
        try:
            if name.rpartition("/")[2].startswith("_"):
                raise HydraException("a protocol shared by several experiments is not an experiment")
            config, _ = check_fields(compose_raw([f"experiment={name}"], config_dir))
        except (HydraException, OmegaConfBaseException):
            config = None
        if config is None:
            raise ConfigError(explain_overrides([f"experiment={name}"], config_dir, compose_raw))
    return config


def is_axis(text: str) -> bool:
    """Return whether an override gives several values, such as `key=a,b` or `key=interval(0,1)`."""
    with hydra_at_conf():
        override = _parsed(text)
    return override is not None and override.is_sweep_override()


def _parsed(text: str) -> Override | None:
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        return parser.parse_overrides([text])[0]
    except HydraException:
        return None


def _product(overrides: Sequence[str]) -> Iterator[list[str]]:
    axes = []
    for text in overrides:
        override = _parsed(text)
        if override is not None and override.is_sweep_override() and override.is_discrete_sweep():
            name = override.get_key_element()
            axes.append([f"{name}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([text])
    return (list(point) for point in itertools.product(*axes))


def _experiment_points(overrides: list[str], name: str, config_dir: str | Path | None) -> list[Point]:
    try:
        config = _load_experiment(name, config_dir)
    except ConfigError:
        # composing the point itself reports all of its mistakes
        return []
    lines = [replace(line, defaults=leading(config)) for line in expand(replace(config.experiment, name=name))]
    given = by_name(overrides)
    defined = given.keys() & {key for line in lines for key in line.settings}
    selected = [line for line in lines if all(_has(line, key, given[key]) for key in defined)]
    points: list[Point] = []
    earlier: dict[tuple[str, str | None], Point] = {}
    for line in lines:
        point = _combined(line, overrides, defined if selected else set(), earlier, config_dir)
        earlier[line.label, point.seed] = point
        if not selected:
            values = {key: point.settings[key] for key in line.settings if key != "seed"}
            points.append(replace(point, parts=values, paper={}, spreads={}))
        elif line in selected:
            points.append(point)
    return points


def _combined(
    line: Point,
    overrides: Sequence[str],
    selecting: set[str],
    earlier: Mapping[tuple[str, str | None], Point],
    config_dir: str | Path | None,
) -> Point:
    """Return a line of an experiment with the overrides of the command line.

    selecting: keys whose overrides only select lines. These keep the experiment's spelling of the values, so that their
    run directories are those of the whole sweep. earlier: the points that it may start from, by label and seed.
    """
    # a seed applies to lines without one
    ignored = selecting if "seed" in line.settings else selecting - {"seed"}
    texts = [text for text in overrides if not by_name([text]).keys() & ignored]
    chosen = by_name(texts)
    settings = line.settings | chosen
    follows = False
    for key, value in line.settings.items():
        if key in chosen:
            continue
        if value.startswith("@"):
            value = earlier[value[1:], settings.get("seed")].directory
            follows = True
        texts.append(f"{key}={value}")
    return Point(texts, settings, line.parts, line.paper, follows, config_dir, line.defaults, line.spreads)


def _has(line: Point, key: str, value: str) -> bool:
    """Return whether an override selects a line. A line without a seed matches every seed."""
    if key not in line.settings:
        return key == "seed"
    return value == line.settings[key] or parsed_value(value) == parsed_value(line.settings[key])


def expand(experiment: Experiment) -> list[Point]:
    """Return the points of an experiment, with lists expanded to all combinations. Raises ConfigError for bad lines."""
    points: dict[tuple[str, str | None], Point] = {}
    errors = []
    for number, line in enumerate(experiment.points):
        where = f"experiment {experiment.name}: points[{number}]"
        if not isinstance(line, dict):
            errors.append(f"{where}={line}: must be settings, as in {{model: mhc, size: 1.5b}}")
            continue
        paper, columns = line.get("paper") or {}, experiment.columns
        errors += [f"{where}.paper.{name}: no such column{nearest(name, columns)}" for name in paper.keys() - columns]
        invalid = {name: value for name, value in paper.items() if not _is_printed(value)}
        errors += [
            f"{where}.paper.{name}={override_text(value)}: must be a number, [number, spread] with a spread from 0, "
            "or null"
            for name, value in invalid.items()
        ]
        line = line | {"paper": {name: value for name, value in paper.items() if name not in invalid}}
        for point in _multiplied(line):
            for value in point.settings.values():
                labels = [above.label for above in points.values()]
                if value.startswith("@") and value[1:] not in labels:
                    errors.append(f"{where}: {value}: no earlier point has this label; allowed: {listed(labels)}")
            key = point.label, point.settings.get("seed")
            if key in points:
                errors.append(f"{where}: a second point with the label {point.label}")
            points[key] = point
    if errors:
        raise ConfigError(errors)
    return list(points.values())


def _multiplied(line: dict[str, Any]) -> Iterator[Point]:
    """Yield the points of a line. The label of a point has the values that the line varies, or all without a name."""
    names = {name: str(line[name]) for name in ("label", "task") if line.get(name)}
    printed = line["paper"]
    paper = {name: value[0] if isinstance(value, list) else value for name, value in printed.items()}
    spreads = {name: value[1] for name, value in printed.items() if isinstance(value, list)}
    axes = {key: value if isinstance(value, list) else [value] for key, value in line.items() if key not in NAMES}
    shown = [key for key, values in axes.items() if key != "seed" and (len(values) > 1 or not names)]
    # the label comes first and the task last
    order = ("label", *shown, "task")
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, map(override_text, values), strict=True))
        texts = settings | names
        parts = {name: texts[name] for name in order if name in texts}
        yield Point([], settings, parts, paper, spreads=spreads)


def _is_printed(value: Any) -> bool:
    """Return whether a value is that of a column in a paper: a number, alone or with its spread, or null."""
    numbers = value if isinstance(value, list) and len(value) == 2 else [value, 0.0]
    if value is None:
        return True
    return all(finite(number) is not None for number in numbers) and numbers[1] >= 0


def parsed_value(text: str) -> Any:
    """Return the value that Hydra parses from a text, so that different spellings compare equal."""
    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text


def print_points(
    points: Sequence[Point], known: Mapping[str, str] | None = None, notes: Mapping[str, str] | None = None
) -> None:
    """Print one line per point: its state, progress and losses, and the reason of a failure.

    known: states of run directories that override what their files say, for example from a scheduler. notes: what to
    add to the lines of run directories, such as why a job waits.
    """
    common = set.intersection(*(set(point.overrides) for point in points)) if len(points) > 1 else set()
    rows, states, progress = [], [], []
    for number, point in enumerate(points):
        run = read_run(point.directory)
        state = (known or {}).get(point.directory, run.state)
        states.append(state)
        progress.append(progress_of(run))
        name = point.label or " ".join(text for text in point.overrides if text not in common)
        loss, validation = run.loss, run.number("validation_loss")
        note = (notes or {}).get(point.directory) or (failure_text(run.failure) if state == FAILED else "")
        rows.append(
            {
                "": str(number),
                "point": escape(f"{name} (seed {point.seed})" if point.seed is not None and point.label else name),
                "state": f"[{STYLES[state]}]{state}[/]" if state in STYLES else state,
                **progress[-1].texts(),
                "loss": "" if loss is None else f"{loss:.4f}",
                "validation": "" if validation is None else f"{validation:.4f}",
                "reason": escape(note),
            }
        )
    console = stdout_console()
    console.print(progress_table(rows))
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(f"{len(points)} points: {counts}{total_hours(progress)}")
