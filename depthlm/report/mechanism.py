"""The mechanism of a series: its name, and the colour that its classes declare, the same in every figure."""

import functools
import importlib
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from depthlm.config.hydra_context import compose_raw, hydra_at_conf
from depthlm.config.saved import is_own
from depthlm.report.rows import Row

# the classes of vanilla's connection and attention
VANILLA = ["depthlm.mechanisms.residual.Residual", "depthlm.model.attention.self_attention.SelfAttention"]
# for mechanisms that declare no colour, from Tol's palette, which colour-blind readers can distinguish
OTHERS = ("#332288", "#44AA99", "#AA4499", "#DDCC77", "#117733", "#6699CC")
PARTS = ("connection", "attention")


class Mechanism(NamedTuple):
    """name: of a preset, or the options of its parts. colour: as "#RRGGBB"; variants of a mechanism share it."""

    name: str
    colour: str


def mechanism_of(row: Row) -> Mechanism:
    """Return the mechanism of a row from its settings: a preset, or the parts that replace vanilla's."""
    return mechanism_from(row.settings, row.points[0].config_dir)


def mechanism_from(settings: Mapping[str, str], config_dir: str | Path | None = None) -> Mechanism:
    """Return the mechanism that these settings choose, among others."""
    parts = [value for name, value in settings.items() if name in ("model/connection", "model/attention")]
    preset = settings.get("model", "vanilla" if not parts else "")
    name = "+".join(filter(None, ["" if parts and preset == "vanilla" else preset, *parts])) or "vanilla"
    chosen = [f"{key}={value}" for key, value in settings.items() if re.match(r"model(/|$)|model\..*_target_$", key)]
    return Mechanism(name, _colour(name, _classes(tuple(chosen), config_dir)))


def mechanism_of_run(name: str, directory: Path, config: Mapping[str, Any]) -> Mechanism:
    """Return the mechanism of a run from its saved configuration, by dotted keys.

    Of somebody else's run, only classes of depthlm are imported.
    """
    classes = [str(config.get(f"model.{part}._target_")) for part in PARTS]
    trusted = is_own(directory) or all(path.startswith("depthlm.") for path in classes)
    return Mechanism(name, _colour(name, classes if trusted else []))


@functools.cache
def _classes(overrides: tuple[str, ...], config_dir: str | Path | None) -> list[str]:
    """Return the classes of the connection and the attention; [] if these overrides cannot be composed."""
    try:
        with hydra_at_conf():
            model = compose_raw(overrides, config_dir).model
        return [str(model[part].get("_target_")) for part in PARTS]
    except (HydraException, OmegaConfBaseException):
        return []


def _colour(name: str, classes: list[str]) -> str:
    """Return the colour of the first class that declares one; a subclass of vanilla's does not have its colour."""
    vanilla, *_ = map(_declared, VANILLA)
    if classes == VANILLA:
        return vanilla
    own = [colour for colour in map(_declared, classes) if colour not in ("", vanilla)]
    return own[0] if own else OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]


def _declared(class_name: str) -> str:
    """Return the colour of a class; "" if it has none."""
    module, _, attribute = class_name.rpartition(".")
    try:
        colour = getattr(getattr(importlib.import_module(module), attribute, None), "colour", "")
    except (ImportError, ValueError):
        return ""
    return colour if re.fullmatch(r"#[0-9A-Fa-f]{6}", str(colour)) else ""
