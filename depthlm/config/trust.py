"""What a saved configuration may make this machine do: only that of the user's own run names anything outside of it.

config.yaml of a run has a signature by a key that only the user who trains it has, in `~/.local/state/depthlm/key`.
"""

import functools
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthlm.config.schema import Config, Model
from depthlm.config.schema.keys import flatten, keys
from depthlm.errors import UserError
from depthlm.files import read_yaml
from depthlm.locations import CONF

# in trust=, besides the names of modules: take paths, addresses and services from the run
RUN = "run"


def signature(text: str) -> str | None:
    """Return the signature of a text by this user's key; None where the key can be neither read nor created."""
    key = _key()
    return None if key is None else hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def targets(model: Model) -> dict[str, str]:
    """Return the class of the connection and of the attention of a mechanism, by its key."""
    return {f"model.{part}": str(getattr(model, part).get("_target_")) for part in ("connection", "attention")}


def check_trusted(saved: Mapping[str, str], trust: Sequence[str], where: str) -> None:
    """Raise UserError if a class of a saved configuration is not from depthlm, torch.optim or a module in `trust`.

    Importing a module executes it, and the file may name any module. saved: classes by key, as `targets` returns them.
    """
    for key, target in saved.items():
        module = target.rpartition(".")[0]
        if not module:
            raise UserError(f"{where}: {key}._target_ names no class ({target}); config.yaml may be damaged")
        if not any(module == name or module.startswith(f"{name}.") for name in ("depthlm", "torch.optim", *trust)):
            raise UserError(f"{where}: {key} is from {module}; name that module in trust=[...] to import it")


def outside_settings(config: Config) -> dict[str, Any]:
    """Return the settings that name paths, addresses or services, unless a file in conf/ has the same value.

    `fields.key` declares them with `outside`.
    """
    outside = {key for key, declared in keys().items() if declared.metadata["outside"]}
    return {
        name: value
        for name, value in flatten(asdict(config)).items()
        if (key := _declared(name)) in outside and value not in (None, [], {}) and f"{key}={value}" not in _shipped()
    }


def check_outside(settings: Mapping[str, Any], trust: Sequence[str], where: str) -> None:
    """Raise UserError for settings of somebody else's run that name paths, addresses or services."""
    if settings and RUN not in trust:
        listed = "\n".join(f"  - {name}: {value}" for name, value in settings.items())
        raise UserError(
            f"{where}: you did not train this run on this machine, or its config.yaml was edited. It names paths, "
            f"addresses or services:\n{listed}\nGive each of them, or trust={RUN} to take them from the run."
        )


def _declared(name: str) -> str:
    """Return the key in the schema of a setting; a named source has the keys of data."""
    return f"data.{name.rpartition('.')[2]}" if name.startswith(("data.sources.", "data.validation.")) else name


@functools.cache
def _shipped() -> frozenset[str]:
    """Return `key=value` for the defaults and for every file in conf/."""
    settings = list(flatten(asdict(Config())).items())
    for file in CONF.rglob("*.yaml"):
        group = file.relative_to(CONF).parts[0]
        prefix = "" if group in ("experiment", "budget", file.name) else f"{group}."
        settings += flatten(read_yaml(file), prefix).items()
    return frozenset({"data.tokenizer=bytes", *(f"{_declared(name)}={value}" for name, value in settings)})


@functools.cache
def _key() -> bytes | None:
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "depthlm"
    file, own = folder / "key", folder / f".key-{secrets.token_hex(8)}"
    try:
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            own.touch(mode=0o600)
            own.write_bytes(secrets.token_bytes(32))
            # another process may have created it
            with suppress(FileExistsError):
                os.link(own, file)
            own.unlink()
        return file.read_bytes() or None
    except (OSError, RuntimeError):
        return None
