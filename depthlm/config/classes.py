"""The classes that a configuration names: of the connection and the attention of a mechanism, and of the optimizer.

A class defines its settings and their allowed values. It may be from outside depthlm, and importing it runs its code.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class

from depthlm.config.schema import Config, Model
from depthlm.errors import UserError, join_names, nearest
from depthlm.locations import PACKAGE, install_command

if TYPE_CHECKING:
    from depthlm.model.attention.self_attention import AttentionFactory
    from depthlm.model.connection import ConnectionFactory

# arguments of an optimizer that its parameter groups set, from the keys beside its settings
SET_BY_GROUPS = {"lr", "weight_decay"}
# packages of classes in conf/, and the extras that install them
EXTRAS = {"pytorch_optimizer": "optimizers"}


def targets(model: Model) -> dict[str, str]:
    """Return the class of the connection and of the attention of a mechanism, by its key."""
    return {f"model.{part}": str(getattr(model, part).get("_target_")) for part in ("connection", "attention")}


def factories(model: Model) -> "tuple[ConnectionFactory, AttentionFactory]":
    """Return the factories of connections and attentions. A `_target_` nested in their settings is not instantiated."""
    connection, attention = (dict(settings) for settings in (model.connection, model.attention))
    return (
        partial(get_class(connection.pop("_target_")), **connection),
        partial(get_class(attention.pop("_target_")), **attention),
    )


def reads_across_layers(model: Model) -> bool:
    """Return whether the attention may read keys and values of other layers."""
    from depthlm.model.attention.self_attention import SelfAttention

    attention: Any = get_class(model.attention["_target_"])
    return attention.attend is not SelfAttention.attend


def check_target(name: str, settings: Any) -> list[str]:
    """Return the mistakes in one of FREE_GROUPS: a wrong class, or settings it does not accept."""
    import torch

    from depthlm.model.attention.self_attention import SelfAttention
    from depthlm.model.connection import Connection

    # the last value: how many leading parameters are not settings
    interface, example, first_setting = {
        "model.connection": (Connection, "depthlm.mechanisms.residual.Residual", 3),
        "model.attention": (SelfAttention, "depthlm.model.attention.self_attention.SelfAttention", 3),
        "optimizer.settings": (torch.optim.Optimizer, "torch.optim.AdamW", 1),
    }[name]
    where = f"{name.removesuffix('.settings')}._target_"
    target = settings.get("_target_")
    if not isinstance(target, str) or "." not in target:
        return [f"{where}={target}: not a class, as in {example}"]
    module, attribute = target.rsplit(".", 1)
    try:
        source = importlib.import_module(module)
    except (ImportError, TypeError, ValueError) as error:
        missing = str(getattr(error, "name", None))
        if extra := EXTRAS.get(missing):
            return [f"{where}={target}: {missing} is not installed; {install_command(extra)}"]
        return [f"{where}={target}: cannot be imported ({error}); is its folder on PYTHONPATH?"]
    named_class = getattr(source, attribute, None)
    if named_class is None:
        classes = [other for other, value in vars(source).items() if inspect.isclass(value)]
        return [f"{where}={target}: {module} has no {attribute}{nearest(attribute, classes)}"]
    if not (inspect.isclass(named_class) and issubclass(named_class, interface)):
        return [f"{where}={target}: not a subclass of {interface.__module__}.{interface.__name__}"]
    parameters = _parameters(named_class)
    if parameters is None:
        return []
    not_settings = {*parameters[:first_setting], *inspect.signature(interface).parameters}
    not_settings |= SET_BY_GROUPS if name == "optimizer.settings" else set()
    allowed = [parameter for parameter in parameters if parameter not in not_settings]
    return [
        f"{name}.{setting}: {target} has no such setting; allowed: {join_names(allowed) or 'none'}"
        + nearest(setting, allowed)
        for setting in settings
        if setting != "_target_" and setting not in allowed
    ]


def _parameters(named_class: type) -> list[str] | None:
    """Return the parameters of a class; None: any. Those of `**kwargs` are what the classes above it name."""
    names: dict[str, None] = {}
    for ancestor in inspect.getmro(named_class)[:-1]:
        if (init := vars(ancestor).get("__init__")) is None:
            continue
        _, *parameters = inspect.signature(init).parameters.values()
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return list(names)
    return None


def check_trusted(saved: Mapping[str, str], trust: Sequence[str], where: str) -> None:
    """Raise UserError if a class of a saved configuration is not from depthlm, torch.optim or a module in `trust`.

    Importing a module executes it, and the file may name any module. saved: classes by key, as `targets` returns them.
    """
    untrusted = {}
    for key, target in saved.items():
        module = target.rpartition(".")[0]
        if not module:
            raise UserError(f"{where}: {key}._target_ names no class ({target}); config.yaml may be damaged")
        if not any(module == name or module.startswith(f"{name}.") for name in ("depthlm", "torch.optim", *trust)):
            untrusted[key] = module
    if untrusted:
        origins = ", ".join(f"{key} is from {module}" for key, module in untrusted.items())
        names = list(dict.fromkeys([*trust, *untrusted.values()]))
        raise UserError(
            f"{where}: {origins}. Loading the run imports that code; if you trust it, add trust={','.join(names)} "
            f"(in Python, trust={json.dumps(names)})"
        )


def classes_of(config: Config) -> set[str]:
    """Return the classes that a configuration names, of the mechanism and the optimizer."""
    return {*targets(config.model).values(), config.optimizer._target_}


def code_digests(classes: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the source of each of these classes from outside depthlm, by class.

    The source is the file of the class, and the files beside it that it imports, directly or not. Packages of the
    Python installation have versions, which environment.json records.
    """
    digests = {}
    for target in sorted({*classes}):
        module = target.rpartition(".")[0]
        spec = None if module.partition(".")[0] in ("", "depthlm", "torch") else _spec(module)
        if spec is None or spec.origin is None:
            continue
        # the folder from which the module is imported
        root = Path(spec.origin).parents[module.count(".") + (spec.submodule_search_locations is not None)]
        if not _is_installed(root):
            files = {file.relative_to(root).as_posix(): file for file in _imported_files(module, root)}
            texts = [f"{name}\n".encode() + files[name].read_bytes() for name in sorted(files)]
            digests[target] = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
    return digests


def _imported_files(module: str, root: Path) -> set[Path]:
    """Return the files in a folder that belong to a module or are imported by it, directly or not."""
    files: dict[str, Path | None] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in files:
            continue
        files[name] = None
        # looking for a module imports its packages, which must not happen to those of others, such as torch in a
        # virtual environment inside the folder
        top = _spec(name.partition(".")[0])
        places = [] if top is None else [top.origin, *(top.submodule_search_locations or ())]
        is_local = any(p and Path(p).is_relative_to(root) and not _is_installed(Path(p)) for p in places)
        spec = _spec(name) if is_local else None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        file = Path(spec.origin)
        if file.is_relative_to(PACKAGE) or not file.is_file():
            continue
        files[name] = file
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        waiting += [name.rpartition(".")[0], *_imports(file, package)]
    return {file for file in files.values() if file is not None}


def _imports(file: Path, package: str) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(source, package) if node.level else source
            # a name may be a module too
            yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))


def _spec(module: str) -> ModuleSpec | None:
    with suppress(ImportError, ValueError, AttributeError):
        return importlib.util.find_spec(module)
    return None


def _is_installed(folder: Path) -> bool:
    places = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return any(folder.is_relative_to(place) for place in places)
