"""The name of a run: of its folder, of its mechanism, and of the settings that its overrides change."""

import functools
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from depthlm.config.keys import is_text, keys, on_resume, override_text, value_at
from depthlm.config.schema import Config
from depthlm.counts import SCALES, parse_count
from depthlm.run_directory import NO_RUNS

# characters of a run's name, beyond which a hash stands for the remaining settings; characters of that hash
LONGEST, HASH = 60, 6
# bytes of a folder's name and of a path, with room for what is written beside a run and inside of it
LONGEST_FOLDER, LONGEST_PATH = 200, 3000
# the sections of the configuration, those that matter most to a reader first; all others follow
IMPORTANCE = (
    "model",
    "optimizer",
    "parametrization",
    "size",
    "backbone",
    "data",
    "schedule",
    "training",
    "precision",
    "init_from",
)
# the sections whose keys have the shortest names: `lr` is that of the optimizer
SHORTEST = ("optimizer", "schedule", "training", "data")
# groups whose options say what they are
BARE = ("model", "size", "data", "optimizer", "budget", "schedule", "precision", "deepspeed", "parametrization")
NUMBER = r"\d+(\.\d+)?(e-\d+)?"
# values that no other value is written like in a name: words, numbers, or a list of numbers
EXACT = re.compile(rf"([\w.+]+(,[\w.+]+)*)?|{NUMBER}(,{NUMBER})*|\[{NUMBER}(,{NUMBER})*\]", re.ASCII)
# what every name begins with, or that sets it
LEADING = ("model", "size", "seed", "model.name", "size.name")
# powers of ten beyond which a number keeps its spelling
FAR = 99


def run_name(config: Config) -> str:
    """Return the name of a run, as in `mhc-tiny-seed1-lr1e-3`: its mechanism, size and seed, then what differs.

    A hash ends it where the differences are too long, or where others would give the same text.
    """
    head = f"{_plain(config.model.name)}-{_plain(config.size.name)}-seed{config.seed}"
    return join_name(head, {name: config.differences[name] for name in sorted(config.differences, key=importance)})


def changed_settings(saved: Config, config: Config, overrides: Sequence[str]) -> dict[str, str]:
    """Return the settings of overrides that make a configuration another run than a saved one, as a name has them."""
    before, after = asdict(saved), asdict(config)
    given = {name.lstrip("~"): text for name, text in by_name(overrides).items()}
    return {
        name: named_value(after, name, given[name])
        for name in sorted(given, key=importance)
        if on_resume(name) != "free"
        and value_at(before, name.replace("/", ".")) != value_at(after, name.replace("/", "."))
    }


def check_name(name: str | None, output_dir: str | None = None) -> list[str]:
    """Return the mistakes in the values of `name=` and `output_dir=`."""
    if name is not None and not (name.strip(". ") and "/" not in name and name.isprintable()):
        return [f"name={name}: must be the name of a folder; output_dir= sets the whole path of the run directory"]
    given = f"output_dir={output_dir}" if name is None else f"name={name}"
    parts = Path(name or output_dir or "").parts
    if (
        any(len(os.fsencode(part)) > LONGEST_FOLDER for part in parts)
        or len(os.fsencode(output_dir or "")) > LONGEST_PATH
    ):
        allowed = f"{LONGEST_FOLDER} bytes, and {LONGEST_PATH} for a path"
        return [f"{given[:LONGEST]}...: too long for a folder; allowed: {allowed}"]
    # `..` is a way to a folder
    last = parts[-1] if parts else ""
    if last in NO_RUNS or (name is not None and last.startswith(".")):
        return [f"{given}: `runs` lists no folder of this name; give another one"]
    return []


def report_name(overrides: Sequence[str], baseline: str | None = None) -> str:
    """Return the name of the folder of a report on a sweep, as in `report-vanilla-mhc-seed1-2`."""
    given = {
        name: normal_value(name, value)
        for name, value in by_name(overrides).items()
        # a choice decides which runs are compared
        if on_resume(name) != "free" or name == "experiment.best_over"
    }
    settings = {name: given[name] for name in sorted(given, key=importance)}
    return join_name("report", settings | ({} if baseline is None else {"baseline": baseline}))


def named_settings(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides that a run is named by, apart from mechanism, size and seed."""
    given = {name.lstrip("~"): text for name, text in by_name(overrides).items()}
    return {name: normal_value(name, text) for name, text in given.items() if is_difference(name)}


def is_difference(name: str) -> bool:
    """Return whether a run is named by a key or group, apart from mechanism, size and seed."""
    return on_resume(name) != "free" and name not in LEADING and not name.startswith("model/")


def named_value(values: Mapping[str, Any], name: str, given: str = "") -> str:
    """Return the value of a key or group as a name has it.

    values: those of a configuration. given: the value of a group without a name, of a key with values inside, and of a
    length that the budget has replaced.
    """
    value = value_at(values, name if is_key(name) else f"{name}.name")
    return normal_value(name, given if value is None or isinstance(value, dict) else override_text(value))


def importance(name: str) -> tuple[int, int, str]:
    """Return the sort key of a key or group: those that matter most to a reader come first."""
    section = re.split(r"[./]", name)[0]
    rank = IMPORTANCE.index(section) if section in IMPORTANCE else len(IMPORTANCE)
    return rank, list(keys()).index(name) if name in keys() else -1, name


def short_key(name: str) -> str:
    """Return the last parts of a key, as many as distinguish it from all others, as in `lr` or `connection.n`."""
    return _short_keys().get(name) or ".".join(name.split(".")[1:]) or name


def setting_text(name: str, value: str) -> str:
    """Return a setting for a label: `muon` for the option of a group, `lr 1e-3` for a key."""
    return _prefix_value(name, short_value(normal_value(name, value)))


def setting_texts(name: str, values: Sequence[str]) -> dict[str, str]:
    """Return the text of each value of a setting for labels: the short ones, if these distinguish the values."""
    short = {value: setting_text(name, value) for value in values}
    return short if len({*short.values()}) == len(short) else {value: _prefix_value(name, value) for value in values}


def short_value(value: str) -> str:
    """Return a value without the folders of a path and without the brackets of a list."""
    return value.strip("[]").rstrip("/").rpartition("/")[2] or value


def normal_value(name: str, value: str) -> str:
    """Return the value of a key or group without quotes, and that of a key as `0.1`, `1e-3`, `600`, `10M` or `true`."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if not is_key(name) or is_text(name):
        return value
    if value.lower() in ("true", "false", "null"):
        return value.lower()
    with suppress(ValueError):
        count = parse_count(value)
        unit = next((unit for unit in reversed(SCALES) if count and count % SCALES[unit] == 0), "")
        return f"{count // SCALES[unit]}{unit}" if count >= 1_000_000 and unit else str(count)
    with suppress(InvalidOperation):
        number = Decimal(value).normalize()
        if number.is_finite() and abs(number.adjusted()) < FAR:
            return min(f"{number:f}", f"{number:e}".replace("e+", "e"), key=len)
    return value


def mechanism_name(preset: str, overrides: Sequence[str]) -> str:
    """Return the name of a mechanism: `mhc+depth_attention`, or `dca,connection=mhc` for a modified preset."""
    given = {name: normal_value(name, value) for name, value in by_name(overrides).items() if name.startswith("model/")}
    # the connection comes before the attention
    parts = {name.rpartition("/")[2]: given[name] for name in sorted(given, reverse=True)}
    if preset != "vanilla":
        return ",".join([preset, *(f"{part}={value}" for part, value in parts.items())])
    return "+".join(value for value in parts.values() if value not in ("residual", "self_attention")) or preset


def experiment_of(overrides: Sequence[str]) -> str | None:
    """Return the experiment given in the overrides, or None."""
    names = [o.partition("=")[2] for o in overrides if o.partition("=")[0].lstrip("+") == "experiment"]
    return names[-1] if names and names[-1] != "null" else None


def given_names(overrides: Sequence[str]) -> set[str]:
    """Return the keys and groups that overrides set or delete."""
    return {name.lstrip("~") for name in by_name(overrides)}


def by_name(overrides: Sequence[str]) -> dict[str, str]:
    """Return the text that each key or group is set to; the last override of a key wins."""
    return dict(text.lstrip("+").partition("=")[::2] for text in overrides)


def join_name(head: str, settings: Mapping[str, str]) -> str:
    """Return a name: its head, which may be empty, then the settings, or those that fit and a hash of all."""
    parts = [part_of(name, value) for name, value in settings.items()]
    name = "-".join(filter(None, [head, *parts]))
    if len(name) <= LONGEST and all(_is_exact(key, value) for key, value in settings.items()):
        return name
    text = "__".join(f"{name}-{value}" for name, value in sorted(settings.items()))
    while parts and len("-".join(filter(None, [head, *parts]))) >= LONGEST - HASH:
        parts.pop()
    return "-".join(filter(None, [head, *parts, hashlib.sha256(os.fsencode(text)).hexdigest()[:HASH]]))


def _is_exact(name: str, value: str) -> bool:
    # a name has a list without its brackets
    return EXACT.fullmatch(value) is not None and not (is_text(name) and value.startswith("["))


def part_of(name: str, value: str) -> str:
    """Return a setting as a part of a run's name, as in `lr1e-3`. value: a normal one."""
    text = _plain(short_value(value))
    separator = "" if text[:1].isdigit() and name not in BARE and is_key(name) else "-"
    # a group inside another one, such as model/connection
    return _prefix_value(name, text, separator).rpartition("/")[2] or _plain(name)


def _prefix_value(name: str, text: str, separator: str = " ") -> str:
    """Return a value with the short name of its key; the options of most groups say what they are."""
    label = short_key(name) if is_key(name) else name.removeprefix("~")
    return text if name in BARE else f"{label}{separator}{text}".rstrip(separator)


def is_key(name: str) -> bool:
    """Return whether a name is that of a key; otherwise it is that of a group, such as optimizer."""
    return name in keys() or "." in name


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)


@functools.cache
def _short_keys() -> dict[str, str]:
    """Return the short name of each key."""

    def rank(name: str) -> int:
        section, _, inner = name.partition(".")
        # a key outside all sections has only one name
        return -1 if not inner else SHORTEST.index(section) if section in SHORTEST else len(SHORTEST)

    taken: dict[str, str] = {}
    for name in sorted(keys(), key=rank):
        parts = name.split(".")
        suffixes = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        taken[next(suffix for suffix in suffixes if suffix not in taken)] = name
    return {name: suffix for suffix, name in taken.items()}
