"""The points of a sweep, as `train.py -m`, slurm/submit.py and `depthlm report` derive them from overrides."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException

from depthlm.config.compose import compose
from depthlm.config.experiment import Experiment
from depthlm.config.from_run import read_sources
from depthlm.config.hydra_context import available_groups, hydra_at_conf, value_text
from depthlm.config.keys import is_text, override_text
from depthlm.config.names import by_name, experiment_of, importance, is_key, setting_texts
from depthlm.config.resolve import alternatives, compose_fields, mistakes_in
from depthlm.config.schema import Config
from depthlm.errors import ConfigError, join_names, nearest
from depthlm.runs.records import RunRecord, finite, read_run
from depthlm.sweeps.best import with_choice
from depthlm.sweeps.point import Point

# keys of a point in an experiment's file that are not settings
NAMES = ("label", "task", "paper")


def sweep_points(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    read: Callable[[str], RunRecord] = read_run,
) -> list[Point]:
    """Return every point: the product of all `key=a,b` axes, times the points of the experiment.

    An override of a setting of the experiment's points selects the points with that value. If no point has it, the
    override replaces the value in the points that the others select, and the paper's numbers no longer apply.

    With `experiment.best_over`, these are the points that the runs so far call for (`depthlm.sweeps.best`). read:
    returns the record of a run directory.

    Raises ConfigError if the points of the experiment are invalid.
    """
    unique_points: dict[tuple[str, ...], Point] = {}
    with hydra_at_conf():
        for combination in _product(overrides, config_dir):
            name = experiment_of(combination)
            points = [] if name is None else _experiment_points(combination, name, config_dir)
            for point in points or [Point(combination, by_name(combination), config_dir=config_dir)]:
                unique_points.setdefault(tuple(sorted(point.overrides)), point)
    points = list(unique_points.values())
    named = points if any(point.parts for point in points) else _label_points(points)
    by_experiment: dict[tuple[str, ...], list[Point]] = {}
    for point in named:
        by_experiment.setdefault(_experiment_overrides(point.overrides), []).append(point)
    known: list[Point] = []
    for texts, members in by_experiment.items():
        # composing a point reports what is invalid
        composed = compose_fields(texts, config_dir) if texts else None
        if composed is not None and composed.experiment.best_over:
            experiment = replace(composed.experiment, name=experiment_of(texts) or "")
            members = with_choice(members, experiment, read)
        known += members
    return known


def plain_points(overrides: Sequence[str], config_dir: str | Path | None) -> list[list[str]]:
    """Return the overrides of the points as the user gives them: every value of a setting that runs would choose."""
    without = "experiment.best_over=null"
    points = sweep_points([*overrides, without], config_dir)
    return [[text for text in point.overrides if text != without] for point in points]


def _experiment_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that choose an experiment and set its keys."""
    return tuple(text for text in overrides if next(iter(by_name([text]))).partition(".")[0] == "experiment")


def _label_points(points: list[Point]) -> list[Point]:
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


def check_points(overrides: Sequence[str], config_dir: str | Path | None = None, *, here: bool = True) -> list[Point]:
    """Return the points after checking each of them. Raises ConfigError with the mistakes in all points.

    here: as in `compose`; False for points that other machines train.
    """
    if not (sources := read_sources(overrides)).from_scratch:
        one = "config=: trains" if sources.run is None else "run=: resumes or varies"
        raise ConfigError([f"{one} one run; define a sweep by its overrides or by experiment="])
    try:
        points = sweep_points(overrides, config_dir)
    except ConfigError as error:
        # a mistake in the points hides none in the overrides
        raise ConfigError([*error.errors, *_mistakes(overrides, config_dir, here)]) from None
    errors = [] if points else [_no_points(overrides, config_dir)]
    directories: set[str | None] = set()
    for point in points:
        try:
            directory = compose(point.checkable(), config_dir, here=here).output_dir
        except ConfigError as error:
            errors.extend(error.errors)
            continue
        if directory in directories:
            errors.append(
                f"output_dir={directory}: several points of the sweep would write there; interpolate the settings that "
                "differ, as in name='${model.name}-${seed}' or output_dir='outputs/mine/${model.name}-${seed}'"
            )
        directories.add(directory)
    if errors:
        raise ConfigError(errors)
    return points


def _mistakes(overrides: Sequence[str], config_dir: str | Path | None, here: bool) -> list[str]:
    """Return the mistakes in the product of the axes, apart from the points of an experiment."""
    errors: list[str] = []
    with hydra_at_conf():
        products = list(_product([text for text in overrides if not text.startswith("experiment")], config_dir))
    for product in products:
        try:
            compose(product, config_dir, here=here)
        except ConfigError as error:
            errors += error.errors
    return errors


def _no_points(overrides: Sequence[str], config_dir: str | Path | None) -> str:
    """Return why the product of the axes is empty."""
    with hydra_at_conf():
        empty = [text for text in overrides if not any(_product([text], config_dir))]
    return f"{', '.join(empty)}: gives no value, so the sweep has no points; glob() selects options of a group"


def load_experiment(name: str, config_dir: str | Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment of this name, with its keys that overrides set (`experiment.baseline=mhc`).

    Raises ConfigError if it does not exist or its file is invalid.
    """
    own = [text for text in _experiment_overrides(overrides) if experiment_of([text]) is None]
    return replace(_load_experiment([f"experiment={name}", *own], config_dir).experiment, name=name)


def _load_experiment(overrides: Sequence[str], config_dir: str | Path | None) -> Config:
    # a protocol that several experiments share is not one itself
    is_shared = (experiment_of(overrides) or "").rpartition("/")[2].startswith("_")
    config = None if is_shared else compose_fields(overrides, config_dir)
    if config is None:
        raise mistakes_in(overrides, config_dir)
    return config


def is_axis(text: str) -> bool:
    """Return whether an override gives several values, such as `key=a,b` or `key=interval(0,1)`."""
    with hydra_at_conf():
        override = _parse(text)
    return override is not None and override.is_sweep_override()


def _parse(text: str) -> Override | None:
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        return parser.parse_overrides([text])[0]
    except HydraException:
        return None


def _product(overrides: Sequence[str], config_dir: str | Path | None) -> Iterator[list[str]]:
    axes = []
    for text in overrides:
        override = _parse(text)
        if override is not None and override.is_sweep_override() and override.is_discrete_sweep():
            name = override.get_key_element()
            axes.append([f"{name}={value}" for value in _axis_values(text, override, config_dir)])
        else:
            axes.append([text])
    return (list(point) for point in itertools.product(*axes))


def _axis_values(text: str, override: Override, config_dir: str | Path | None) -> list[str]:
    """Return the values of an axis as texts of overrides."""
    name, axis = override.key_or_group, override.value()
    if isinstance(axis, Glob):
        # Hydra does not know the options of the additional folder here
        return axis.filter(available_groups(config_dir).get(name, []))
    values = list(override.sweep_string_iterator())
    _check_sorted(text, values)
    given = [value.strip() for value in text.partition("=")[2].split(",")]
    # Hydra reads 1.10 as a number, which would become 1.1
    is_plain = isinstance(axis, ChoiceSweep) and axis.simple_form and len(given) == len(values)
    return given if is_plain and is_text(name) else values


def _check_sorted(text: str, values: Sequence[str]) -> None:
    """Raise ConfigError if a sorted range has other values than the range: Hydra sorts one by changing its ends."""
    inner = re.search(r"range\([^()]*\)", text)
    plain = _parse(f"{text.partition('=')[0]}={inner[0]}") if inner and "sort(" in text else None
    if plain is not None and sorted(plain.sweep_string_iterator()) != sorted(values):
        wanted = ",".join(sorted(plain.sweep_string_iterator(), key=float))
        what = f"Hydra gives the values {','.join(values)}, which are not those of {inner[0] if inner else text}"
        raise ConfigError([f"{text}: {what}; list them, as in {text.partition('=')[0]}={wanted}"])


def _experiment_points(overrides: list[str], name: str, config_dir: str | Path | None) -> list[Point]:
    try:
        config = _load_experiment([f"experiment={name}"], config_dir)
    except ConfigError:
        # composing the point itself reports all of its mistakes
        return []
    lines = [replace(line, default_seed=str(config.seed)) for line in expand(replace(config.experiment, name=name))]
    given = by_name(overrides)
    defined = given.keys() & {key for line in lines for key in line.settings}
    selected, selecting = lines, set[str]()
    # a mechanism or a size selects before a value that is given for it
    for key in sorted(defined, key=lambda name: (is_key(name), importance(name))):
        if narrowed := [line for line in selected if _has(line, key, given[key])]:
            selected, selecting = narrowed, selecting | {key}
    points: list[Point] = []
    earlier: dict[tuple[str, str | None], Point] = {}
    for line in lines:
        # a point that others start from keeps its settings
        point = _combine(line, overrides, selecting if line in selected else defined, earlier, config_dir)
        earlier[line.label, point.seed] = point
        if line not in selected:
            continue
        if defined - selecting:
            values = {key: point.settings[key] for key in line.settings if key != "seed" and key in point.settings}
            point = replace(point, parts=values, paper={}, spreads={})
        points.append(point)
    return points


def _combine(
    line: Point,
    overrides: Sequence[str],
    selecting: set[str],
    earlier: Mapping[tuple[str, str | None], Point],
    config_dir: str | Path | None,
) -> Point:
    """Return a line of an experiment with the overrides of the command line.

    selecting: keys whose overrides only select lines. These keep the experiment's spelling of the values, so that their
    run directories are those of the whole sweep. earlier: the points that it may start from, by label and seed.

    An override with another mechanism also drops what the line sets of its own mechanism, and one with a length or a
    warm-up the line's own.

    Raises ConfigError if the point that it starts from does not have its seed.
    """
    # a seed applies to lines without one
    ignored = selecting if "seed" in line.settings else selecting - {"seed"}
    texts = [text for text in overrides if not by_name([text]).keys() & ignored]
    chosen = by_name(texts)
    own = line.settings
    if "model" in chosen and not _has(line, "model", chosen["model"]):
        own = {key: value for key, value in own.items() if not key.startswith(("model.", "model/"))}
    replaced = {other for key, value in chosen.items() if value != "null" for other in alternatives(key)}
    own = {key: value for key, value in own.items() if key not in replaced}
    settings = own | chosen
    follows = False
    for key, value in own.items():
        if key in chosen:
            continue
        if value.startswith("@"):
            seed = settings.get("seed")
            if (value[1:], seed) not in earlier:
                seeds = [other or "the default" for label, other in earlier if label == value[1:]]
                raise ConfigError([f"{key}={value}: that point has no seed {seed}; its seeds: {join_names(seeds)}"])
            value = value_text(key, earlier[value[1:], seed].directory)
            follows = True
        texts.append(f"{key}={value}")
    return Point(texts, settings, line.parts, line.paper, follows, config_dir, line.default_seed, line.spreads)


def _has(line: Point, key: str, value: str) -> bool:
    """Return whether an override selects a line. A line without a seed matches every seed."""
    if key not in line.settings:
        return key == "seed"
    return value == line.settings[key] or parse_value(value) == parse_value(line.settings[key])


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
        for point in _multiply(line):
            for value in point.settings.values():
                if value.startswith("@") and value[1:] not in (labels := [label for label, _ in points]):
                    errors.append(f"{where}: {value}: no earlier point has this label; allowed: {join_names(labels)}")
            key = point.label, point.settings.get("seed")
            if key in points:
                errors.append(f"{where}: a second point with the label {point.label}")
            points[key] = point
    if errors:
        raise ConfigError(errors)
    return list(points.values())


def _multiply(line: dict[str, Any]) -> Iterator[Point]:
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


def parse_value(text: str) -> Any:
    """Return the value that Hydra parses from a text, so that different spellings compare equal."""
    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
