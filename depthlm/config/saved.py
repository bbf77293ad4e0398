"""The saved configuration of a run directory: what it may make this machine do, and how another one differs from it.

Only the configuration of the user's own run may name anything outside of it. config.yaml has a signature by a key that
only the user who trains the run has, in `~/.local/state/depthlm/key`.
"""

import dataclasses
import functools
import hashlib
import hmac
import inspect
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from hydra.utils import get_class
from omegaconf._utils import get_omega_conf_dumper, get_yaml_loader

from depthlm.config.keys import flatten, keys, on_resume, validate_values, value_at
from depthlm.config.schema import Config
from depthlm.errors import UserError
from depthlm.files import YAML_LOADER, check_yaml, read_text, read_yaml
from depthlm.locations import CONF
from depthlm.run_directory import RunDirectory

SIGNED = "# signed: "
# in trust=, besides the names of modules: take paths, addresses and services from the run
RUN = "run"


# OmegaConf's, which keep interpolations and text such as 1e-3 as text, with the parser and the emitter of libyaml
LOADER: Any = get_yaml_loader()
DUMPER: Any = get_omega_conf_dumper()
HAS_LIBYAML = YAML_LOADER is not yaml.SafeLoader
if HAS_LIBYAML:
    LOADER = type("Loader", (YAML_LOADER, LOADER), {})
    represent_text, DUMPER = DUMPER.str_representer, type("Dumper", (yaml.CSafeDumper,), {})
    DUMPER.add_representer(str, represent_text)


def config_text(config: Config) -> str:
    """Return a configuration as YAML."""
    # PyYAML writes line breaks of Unicode, such as U+0085, as they are, and reads a space
    return yaml.dump(dataclasses.asdict(config), Dumper=DUMPER, allow_unicode=HAS_LIBYAML, sort_keys=False)


def signed_config_text(config: Config) -> str:
    """Return a configuration as config.yaml contains it, with the user's signature in the first line."""
    text = config_text(config)
    signed = signature(text)
    return text if signed is None else f"{SIGNED}{signed}\n{text}"


def is_own(directory: Path) -> bool:
    """Return whether this user has trained the run in a directory: its config.yaml has the user's signature."""
    try:
        head, _, text = read_text(RunDirectory(directory).config).partition("\n")
    except (OSError, ValueError):
        return False
    expected, given = signature(text), head.removeprefix(SIGNED)
    return expected is not None and hmac.compare_digest(given.encode(), expected.encode())


def load_config(directory: Path) -> Config:
    """Return the resolved configuration saved in a run directory; nothing in it is interpolated.

    Raises UserError if there is none, if it cannot be read, or if it has other keys or values than a `Config` has.
    """
    run = RunDirectory(directory)
    if not run.config.is_file() and not run.checkpoint_folders():
        raise UserError(f"{directory}: no run in it (config.yaml is missing)")
    return read_config(run.config, f"{directory} holds a run whose config.yaml")


def read_config(file: Path, subject: str) -> Config:
    """Return the resolved configuration in a file; nothing in it is interpolated. subject: of the messages.

    Raises UserError if it cannot be read, or if it has other keys or values than a `Config` has.
    """
    try:
        text = read_text(file)
        check_yaml(text)
        saved = yaml.load(text, Loader=LOADER)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{subject} cannot be read ({error})") from None
    if not saved or not isinstance(saved, dict):
        raise UserError(f"{subject} cannot be read (it has no keys)")
    config, errors = validate_values(of_this_version(saved))
    if config is None:
        is_foreign = any("no such key" in error for error in errors)
        what = "not the configuration of a run of this version: " if is_foreign else ""
        remedy = "; environment.json names the version that can read it" if is_foreign else ""
        raise UserError(f"{file}: {what}{'; '.join(errors)}{remedy}")
    return config


def as_text(value: Any) -> Any:
    """Return plain data for OmegaConf in which interpolations such as ${oc.env:HOME} are text."""
    if isinstance(value, dict):
        return {key: as_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_text(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def of_this_version(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved configuration with the keys of this version.

    Runs without `precision.fp32_residual` had it under autocast; `experiment.best_over` was a list. Keys that this
    version lacks are left out where they had no effect on the result.
    """
    precision, sharding, experiment = (saved.get(key) for key in ("precision", "deepspeed", "experiment"))
    changed: dict[str, Any] = {}
    if isinstance(precision, dict) and isinstance(sharding, dict) and "fp32_residual" not in precision:
        autocast = precision.get("name") == "bf16" and sharding.get("stage") == 0
        changed["precision"] = precision | {"fp32_residual": autocast}
    if isinstance(experiment, dict) and isinstance(best_over := experiment.get("best_over"), list):
        changed["experiment"] = experiment | {"best_over": best_over[0] if best_over else None}
    if isinstance(tracker := saved.get("tracker"), dict):
        changed["tracker"] = {key: v for key, v in tracker.items() if key not in ("trackio", "artifacts", "space")}
    if isinstance(model := saved.get("model"), dict) and model.get("kept_sources") == {}:
        changed["model"] = {key: v for key, v in model.items() if key != "kept_sources"}
    return saved | changed


def compare(saved: Any, now: Any, prefix: str = "") -> dict[str, str]:
    """Return the keys that differ and may affect the result, each with a description of both values.

    A run of an older version lacks newer keys, whose defaults must have the effect that it had without them.
    """
    differences: dict[str, str] = {}
    saved = saved if prefix else of_this_version(saved)
    for key in sorted({*saved, *now}):
        name = f"{prefix}{key}"
        if on_resume(name) == "free":
            continue
        if prefix == "code." and not (key in saved and key in now):
            # another class is a difference by its name
            continue
        if name == "data.held_out_by" and key not in saved:
            # runs that did not record it, as those of docs/results, had either; the digest of their tokens is compared
            continue
        new = now.get(key)
        old = saved[key] if key in saved else _default(name, now)
        if isinstance(old, dict) and isinstance(new, dict):
            differences |= compare(old, new, f"{name}.")
        elif old != new:
            differences[name] = f"the run has {old}, this command gives {new}"
    return differences


def fixed_changes(saved: Config, config: Config) -> dict[str, str]:
    """Return the settings that make a configuration another run than a saved one, each with both values."""
    differences = compare(asdict(saved), asdict(config))
    return {name: text for name, text in differences.items() if on_resume(name) == "fixed"}


def _default(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the default of a key or of a section of keys; settings: those of its group."""
    group, _, key = name.rpartition(".")
    if group in ("model.connection", "model.attention") and "_target_" in settings:
        module = str(settings["_target_"]).rpartition(".")[0]
        if not module.startswith("depthlm.") and module not in sys.modules:
            # comparing imports nothing that a run names
            return None
        parameter = inspect.signature(get_class(settings["_target_"])).parameters.get(key)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default
    return value_at(_defaults(), name)


@functools.cache
def _defaults() -> dict[str, Any]:
    return dataclasses.asdict(Config())


def check_reach(directory: Path, config: Config, trust: Sequence[str], needed: Callable[[str], bool]) -> None:
    """Raise UserError if the saved configuration of somebody else's run names paths, addresses or services.

    `fields.key` declares these settings with `outside`. Those with the value of a file in conf/ are allowed.

    needed: whether the command takes a setting from the run.
    """
    if RUN in trust or is_own(directory):
        return
    listed = "\n".join(
        f"  - {name}: {value}"
        for name, value in flatten(asdict(config)).items()
        if (key := _find_key(name)) in keys()
        and keys()[key].metadata["outside"]
        and value not in (None, [], {})
        and f"{key}={value}" not in _shipped_values()
        and needed(name)
    )
    if listed:
        raise UserError(
            f"{directory}: you did not train this run on this machine, or its config.yaml was edited. It names paths, "
            f"addresses or services:\n{listed}\nGive each of them, or trust={RUN} to take them from the run."
        )


def signature(text: str) -> str | None:
    """Return the signature of a text by this user's key; None where the key can be neither read nor created."""
    key = _key()
    return None if key is None else hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _find_key(name: str) -> str:
    """Return the key in the schema of a setting; a named source has the keys of data."""
    return f"data.{name.rpartition('.')[2]}" if name.startswith(("data.sources.", "data.validation.")) else name


@functools.cache
def _shipped_values() -> frozenset[str]:
    """Return `key=value` for the defaults and for every file in conf/."""
    settings = list(flatten(asdict(Config())).items())
    for file in CONF.rglob("*.yaml"):
        group = file.relative_to(CONF).parts[0]
        prefix = "" if group in ("experiment", "budget", file.name) else f"{group}."
        settings += flatten(read_yaml(file), prefix).items()
    return frozenset({"data.tokenizer=bytes", *(f"{_find_key(name)}={value}" for name, value in settings)})


@functools.cache
def _key() -> bytes | None:
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "depthlm"
    file, new = folder / "key", folder / f".key-{secrets.token_hex(8)}"
    try:
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            new.touch(mode=0o600)
            new.write_bytes(secrets.token_bytes(32))
            # another process may have created it
            with suppress(FileExistsError):
                os.link(new, file)
            new.unlink()
        return file.read_bytes() or None
    except (OSError, RuntimeError):
        return None
