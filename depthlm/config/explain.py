"""Why overrides do not compose: every mistake of a command line at once, each with what is allowed."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from depthlm.config.checks import check_fields
from depthlm.config.errors import listed, nearest
from depthlm.config.keys import keys, leaves
from depthlm.locations import CONF

Compose = Callable[[Sequence[str], str | Path | None], DictConfig]


def explain_overrides(overrides: Sequence[str], config_dir: str | Path | None, compose: Compose) -> list[str]:
    """One line a mistake. Groups are judged first; then each key alone, on top of the groups that are right."""
    errors: list[str] = []
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except HydraException:
            errors.append(f"{text}: not an override; write key=value, and quote a value that holds spaces or commas")
    available = available_groups(config_dir)
    groups: list[str] = []
    values: dict[str, Override] = {}
    for override in parsed:
        name = override.key_or_group
        given = override.input_line or name
        if override.is_sweep_override():
            errors.append(f"{given}: several values; add -m to train each, or write [a,b] for a list")
        elif name in available and not override.is_delete():
            options = available[name]
            if override.value() in options or (override.value() is None and name == "experiment"):
                groups.append(given)
            else:
                # mechanisms are what readers add
                own = "; one of your own: --config-dir" if name.startswith("model") and config_dir is None else ""
                errors.append(
                    f"{given}: no such {name}; allowed: {listed(options)}{nearest(str(override.value()), options)}{own}"
                )
        else:
            values[given] = override
    composed, failure = _try(compose, groups, config_dir)
    if composed is None:
        return [*errors, *failure]
    base = set(check_fields(composed))
    for given, override in values.items():
        alone, failure = _try(compose, [*groups, given], config_dir)
        if alone is None:
            errors.append(_explain_value(override, composed, available, failure))
        else:
            errors.extend(error for error in check_fields(alone) if error not in base)
    # what the groups themselves leave open, such as data.source of data=local, unless an override closes it
    everything, failure = _try(compose, [*groups, *values], config_dir)
    if everything is not None:
        errors.extend(check_fields(everything))
    elif not errors:
        errors.extend(failure)
    return errors


def available_groups(config_dir: str | Path | None) -> dict[str, list[str]]:
    """Every configuration group with its options, those of config_dir included."""
    folders = [CONF] if config_dir is None else [CONF, Path(config_dir)]
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            group, _, option = file.relative_to(folder).with_suffix("").as_posix().rpartition("/")
            root, _, rest = group.partition("/")
            if root == "experiment":
                # a folder for each paper, and one choice among all their files
                group, option = root, f"{rest}/{option}".lstrip("/")
            if group and root != "hydra" and not file.stem.startswith("_"):
                found.setdefault(group, set()).add(option)
    return {group: sorted(options) for group, options in sorted(found.items())}


def _try(compose: Compose, overrides: list[str], config_dir: str | Path | None) -> tuple[DictConfig | None, list[str]]:
    try:
        raw = compose(overrides, config_dir)
        check_fields(raw)
        return raw, []
    except MissingMandatoryValue as error:
        return None, [f"{error.full_key}: has no default; give {error.full_key}=..."]
    except InterpolationResolutionError as error:
        return None, [f"{error.full_key}: {str(error).splitlines()[0]}"]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return None, [_one_line(error)]


def _one_line(error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = getattr(cause, "full_key", None)
    # what Hydra says of a file ends in a colon, and the reason follows
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), type(cause).__name__)
    return (f"{key}: " if key else "") + text


def _explain_value(override: Override, composed: DictConfig, groups: Iterable[str], failure: list[str]) -> str:
    name, given = override.key_or_group, override.input_line
    known = keys()
    if name in known and not override.is_delete():
        if "interpolation" in failure[0].lower():
            return f"{given}: {failure[0].split(': ', 1)[-1]}"
        return f"{given}: must be {known[name].wanted}"
    present = list(dict.fromkeys([*known, *leaves(composed), *groups]))
    if name in present or name.startswith("hydra"):
        return f"{given}: {failure[0]}"
    sections = {key.rsplit(".", 1)[0] for key in known if "." in key}
    if name in sections:
        inside = [key for key in known if key.startswith(name + ".")]
        return f"{given}: a group of keys; set one of {listed(inside)}"
    return f"{given}: no such key{nearest(name, present)}"
