"""Configurations that Hydra does not compose: `run=<directory>` with overrides on top, and `config=<file>` alone."""

from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from depthlm.config.classes import check_trusted, targets
from depthlm.config.hydra_context import apply_values, available_groups, compose_raw, open_names, value_text
from depthlm.config.keys import flatten
from depthlm.config.names import by_name, changed_settings, given_names, importance, is_difference, join_name
from depthlm.config.resolve import LENGTHS
from depthlm.config.saved import as_text, fixed_changes, load_config
from depthlm.config.schema import Config
from depthlm.errors import ConfigError, UserError
from depthlm.run_directory import RunDirectory

GIVEN = RUN, FILE, TRUST = "run=", "config=", "trust="
CONFIG = RunDirectory(Path()).config.name
# groups that determine the whole configuration, so they cannot be changed in a complete one
PROTOCOL = ("experiment", "budget")
# keys of a single invocation of the command, reset to these defaults
MOMENTARY = {"resume": "auto", "dry_run": False, "training.stop_after": None, "training.profile": False}


class Sources(NamedTuple):
    """What a command composes: overrides, on top of a run (`run=`) or of the file of a configuration (`config=`).

    overrides: without `run=`, `config=` and `trust=`, which are not keys of the configuration. trust: the modules that
    `trust=` names. config_dir: an additional folder of configuration files.
    """

    overrides: list[str]
    run: Path | None = None
    file: Path | None = None
    trust: Sequence[str] = ()
    config_dir: str | Path | None = None

    @property
    def from_scratch(self) -> bool:
        """Whether Hydra composes the whole configuration, since there is neither a run nor a file."""
        return self.run is None and self.file is None


def read_sources(overrides: Sequence[str], config_dir: str | Path | None = None) -> Sources:
    """Return what the overrides compose.

    Raises ConfigError for two files, and for other overrides beside one than keys of a single invocation, such as
    dry_run; UserError for two runs, for a file that does not exist, and for the file of a run.
    """
    values = {prefix: [text.removeprefix(prefix) for text in overrides if text.startswith(prefix)] for prefix in GIVEN}
    runs, files = values[RUN], values[FILE]
    others = [text for text in overrides if text.partition("=")[0] not in (*MOMENTARY, "config")]
    if files and others:
        raise ConfigError([f"{text}: not with config=, which gives the whole configuration" for text in others])
    if len(files) > 1:
        raise ConfigError(["config=: give one file"])
    if len(runs) > 1 or runs == [""]:
        raise UserError("run=: give one run directory, as in run=outputs/default/vanilla-tiny-seed1")
    if files and not Path(files[0]).is_file():
        raise UserError(f"{FILE}{files[0]}: no such file")
    if files and Path(files[0]).name == CONFIG:
        raise UserError(f"{FILE}{files[0]}: is the configuration of a run; give run={Path(files[0]).parent}")
    trust = [name.strip() for text in values[TRUST] for name in text.strip("[]").split(",")]
    run, file = (Path(paths[0]) if paths else None for paths in (runs, files))
    # from scratch, trust= is a mistake
    given = GIVEN if runs or files else ()
    texts = [text for text in overrides if not text.startswith(given)]
    return Sources(_expand(texts) if runs else texts, run, file, trust, config_dir)


def _expand(overrides: Sequence[str]) -> list[str]:
    """Return overrides with one for each key of a mapping, since a mapping changes its keys alone.

    A mapping that other overrides cannot express stays; it is merged into the group of the run.
    """
    parser, texts = OverridesParser.create(), []
    for text in overrides:
        expanded: list[str] = []
        with suppress(HydraException):
            override = parser.parse_override(text)
            name, value = override.key_or_group, override.value()
            values = flatten(value) if isinstance(value, dict) and "/" not in name else {}
            expanded = [f"{name}.{key}={value_text(f'{name}.{key}', inner)}" for key, inner in values.items()]
            read = [parser.parse_override(each) for each in expanded]
            if {each.key_or_group: each.value() for each in read} != {f"{name}.{k}": v for k, v in values.items()}:
                expanded = []
        texts += expanded or [text]
    return texts


def compose_on(
    saved: Config, check: Callable[[Set[str]], None], overrides: Sequence[str], config_dir: str | Path | None
) -> DictConfig:
    """Return a resolved configuration with overrides on top, unchecked. Call it only inside `hydra_at_conf`.

    A group (`schedule=wsd`) replaces the whole group, and a key replaces its value. Raises as `compose_raw` does.

    check: raises for classes of the saved configuration; called with the keys and groups that the overrides set.
    """
    parsed = OverridesParser.create().parse_overrides(open_names(overrides, settings=True))
    # a mapping is merged into the group of the run, whose class stays
    merged = [override for override in parsed if isinstance(override.value(), dict)]
    named = [override for override in parsed if not override.is_delete() and override not in merged]
    check({override.key_or_group.replace("/", ".") for override in named})
    available = available_groups(config_dir)
    groups = [override for override in parsed if override.key_or_group in available and override not in merged]
    raw = OmegaConf.create(as_text(asdict(saved)))
    OmegaConf.set_struct(raw, True)
    options = compose_raw([str(override.input_line) for override in groups], config_dir)
    for override in groups:
        name = override.key_or_group.replace("/", ".")
        OmegaConf.update(raw, name, OmegaConf.select(options, name), merge=False, force_add=True)
    apply_values(raw, [override for override in parsed if override not in groups])
    return raw


def refuse_protocol(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides that cannot change a complete configuration, each with its mistake."""
    return {
        text: f"{text}: not with run=, whose configuration is complete; leave out run= to compose it from scratch"
        for text in overrides
        if any(name.partition(".")[0] in PROTOCOL for name in given_names([text]))
    }


def check_classes(run: Path, saved: Config, trust: Sequence[str], named: Set[str]) -> None:
    """Raise UserError if a class of a run is from a module that `trust=` does not name, unless it is replaced.

    named: the keys and groups that the overrides set.
    """
    classes = targets(saved.model) | {"optimizer": saved.optimizer._target_}
    check_trusted({key: name for key, name in classes.items() if not _names(named, key)}, trust, str(run))


def changes(run: Path, config: Config) -> dict[str, str]:
    """Return the settings that make this a different run from the one it derives from, each with both values."""
    return _changes(load_config(run), config)


def place_derived(run: Path, saved: Config, config: Config, overrides: Sequence[str]) -> Config:
    """Return a configuration derived from a run with its directory: that of the run, unless the result would differ.

    Another one is beside the run, and has its name, a `+`, and the settings that the overrides change. Only derived
    runs have a `+` there: other values of a resolved configuration than those of a direct command stay as they are.
    """
    changed = changed_settings(saved, config, overrides)
    named = saved.differences
    if fixed_changes(saved, config):
        named = named | {name: text for name, text in changed.items() if is_difference(name)}
    config = replace(config, differences={name: named[name] for name in sorted(named, key=importance)})
    name = None if config.name == saved.name else config.name
    if by_name(overrides).get("output_dir", "null") == "null":
        if not _changes(saved, config):
            return replace(config, output_dir=str(run))
        # "." and ".." have a name only after they are resolved
        origin = run if run.name.strip(".") else run.resolve()
        derived = "+".join(filter(None, [origin.name, join_name("", changed)]))
        config = replace(config, output_dir=str(origin.parent / (name or derived)))
    return config if config.output_dir == str(run) else replace(config, name=name)


def _changes(saved: Config, config: Config) -> dict[str, str]:
    extending = {*LENGTHS} if config.resume == "extend" else set()
    return {name: text for name, text in fixed_changes(saved, config).items() if name not in extending}


def _names(named: Set[str], key: str) -> bool:
    """Return whether the overrides themselves name the class of this key, which makes importing it safe."""
    return not named.isdisjoint((key.partition(".")[0], key, f"{key}._target_"))
