"""Export the code of a decoder: its modules, in one flat folder that needs only PyTorch and transformers.

The folder is flat because transformers copies only the files that a chain of `from .<file> import ...` leads to.
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from depthlm.errors import UserError
from depthlm.hugging_face.causal_lm import CausalLM, DepthLMConfig
from depthlm.model import Decoder
from depthlm.model.attention import attention_class

MODELING = "modeling_depthlm"
# packages that are available wherever transformers is
AVAILABLE = ("torch", "transformers", "numpy", "safetensors", "tokenizers", *sys.stdlib_module_names)


def auto_map() -> dict[str, str]:
    """Return where transformers finds the classes, for config.json."""
    return {
        "AutoConfig": f"{flat_name(DepthLMConfig.__module__)}.{DepthLMConfig.__name__}",
        "AutoModelForCausalLM": f"{MODELING}.DepthLMForCausalLM",
    }


def write_code(model: Decoder, folder: Path) -> None:
    """Write the modules of this decoder, and the module that names the classes of its mechanism.

    Raises UserError if a module of the mechanism needs a package that is not available wherever transformers is.
    """
    connection, attention = type(model.connections[0]), attention_class(layer.attention for layer in model.layers)
    sources = collect([DepthLMConfig.__module__, CausalLM.__module__, connection.__module__, attention.__module__])
    files = {
        flat_name(module): f"# Copied from {module.replace('.', '/')}.py by `python -m depthlm export`.\n{text}"
        for module, text in sources.items()
    }
    names = [(CausalLM, "CausalLM"), (connection, "ConnectionClass"), (attention, "AttentionClass")]
    imports = "\n".join(f"from .{flat_name(c.__module__)} import {c.__qualname__} as {name}" for c, name in names)
    files[MODELING] = (
        f'"""A decoder with {connection.__qualname__} connections and {attention.__qualname__}."""\n\n{imports}\n\n\n'
        "class DepthLMForCausalLM(CausalLM):\n"
        "    connection_class = ConnectionClass\n    attention_class = AttentionClass\n"
    )
    # transformers knows a class by the text of its file, and the model's class by the file of the configuration. With
    # equal files, two exports of the same folder name in one process would share the model's class.
    digest = hashlib.sha256("".join(f"{name}\n{files[name]}" for name in sorted(files)).encode()).hexdigest()
    files[flat_name(DepthLMConfig.__module__)] += f"\n# SHA-256 of all code of this export: {digest}\n"
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def collect(modules: Iterable[str]) -> dict[str, str]:
    """Return the flattened text of these modules and of all that they import from depthlm or their packages."""
    waiting, texts = list(modules), {}
    packages = {name.partition(".")[0] for name in waiting}
    while waiting:
        module = waiting.pop()
        if module not in texts:
            texts[module], needed = flatten(module, packages)
            waiting.extend(needed)
    return texts


def flatten(module: str, packages: set[str]) -> tuple[str, list[str]]:
    """Return a module's text with imports from `packages` adapted to a flat folder, and the modules that it imports."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError(f"{module}: not a file of Python code, so an export cannot include it")
    file = Path(spec.origin)
    text = file.read_text(encoding="utf-8")
    tree, lines, needed = ast.parse(text), text.splitlines(keepends=True), []
    # transformers does not require packages that are imported inside a `try`
    optional = {id(node) for outer in ast.walk(tree) if isinstance(outer, ast.Try) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_own(alias.name, packages):
                    raise _refusal(file, node, f"import {alias.name}", f"write `from {alias.name} import ...`")
                if id(node) not in optional:
                    _check_available(alias.name, file, node)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
                source = importlib.util.resolve_name("." * node.level + source, package)
            elif not _is_own(source, packages):
                if id(node) not in optional:
                    _check_available(source, file, node)
                continue
            line = lines[node.lineno - 1]
            start = len(line.encode()[: node.col_offset].decode())
            words = f"from {'.' * node.level}{node.module or ''} import"
            if any(_is_module(f"{source}.{alias.name}") for alias in node.names) or not line[start:].startswith(words):
                raise _refusal(file, node, line.strip(), "import names from the module that defines them")
            lines[node.lineno - 1] = f"{line[:start]}from .{flat_name(source)} import{line[start + len(words) :]}"
            needed.append(source)
    return "".join(lines), needed


def flat_name(module: str) -> str:
    """Return the name of a module's file in an export: depthlm_model_layers for depthlm.model.layers."""
    return module.replace(".", "_")


def _is_own(name: str, packages: set[str]) -> bool:
    """Return whether a module is part of depthlm or of the user's code: a mechanism's package, or a local module."""
    top = name.partition(".")[0]
    if top in packages or top in AVAILABLE:
        return top in packages
    spec = importlib.util.find_spec(top)
    return spec is not None and "site-packages" not in (spec.origin or "site-packages")


def _check_available(name: str, file: Path, node: ast.stmt) -> None:
    if name.partition(".")[0] not in AVAILABLE:
        raise _refusal(file, node, f"import of {name}", "an export may only need PyTorch, transformers and NumPy")


def _refusal(file: Path, node: ast.stmt, what: str, remedy: str) -> UserError:
    return UserError(f"{file}:{node.lineno}: {what}: an export cannot include this; {remedy}")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
