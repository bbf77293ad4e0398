"""Export a run as a Hugging Face folder.

config.json, generation_config.json       the configuration for transformers
model.safetensors                         the weights, in fp32
tokenizer.json, tokenizer_config.json     the run's tokenizer
*.py                                      the decoder's code, if transformers does not have the model; in one flat
                                          folder, since transformers copies only the files to which a chain of
                                          `from .<file> import ...` leads
README.md, loss.png                       the model card and its picture
depthlm.json                              the exported run, and the files of the export
"""

import ast
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Encoder
from transformers import GenerationConfig, PreTrainedTokenizerFast

from depthlm.build import load_checkpoint
from depthlm.config import Config
from depthlm.data import Tokenizer
from depthlm.data.tokenizers import PADDING
from depthlm.errors import UserError
from depthlm.files import digest, read_json, read_text, replace_folder, set_default_mode, system_limit
from depthlm.hugging_face.card import CARD, check_license, write_card
from depthlm.hugging_face.causal_lm import CausalLM, DepthLMConfig
from depthlm.model import Decoder
from depthlm.model.attention import attention_class
from depthlm.pretrained.folder import export_name, native_config, native_type
from depthlm.run_directory import RunDirectory

MODELING = "modeling_depthlm"
# packages that are available wherever transformers is
AVAILABLE = ("torch", "transformers", "numpy", "safetensors", "tokenizers", *sys.stdlib_module_names)
WEIGHTS, ABOUT = "model.safetensors", "depthlm.json"


class Export(NamedTuple):
    """An export: its folder, the size of each file in bytes, the number of parameters, and the type of the model.

    native: whether the model type is part of transformers.
    """

    folder: Path
    files: dict[str, int]
    parameters: int
    model_type: str
    native: bool


def export(run: str | Path, to: str | Path | None, trust: Sequence[str], license: str | None) -> Export:
    """Write the folder of an export, as `depthlm.hugging_face.export` does."""
    check_license(license)
    folder = RunDirectory(Path(run)).export if to is None else Path(to)
    check_folder(folder)
    model, config, manifest = load_checkpoint(run, trust=trust)
    tokenizer = as_tokenizer(Tokenizer.load(run), config.training.sequence_length)
    native = native_type(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        with replace_folder(folder) as new:
            write_config(model, config, tokenizer, native, new)
            write_weights(model, native, new)
            write_tokenizer(tokenizer, new)
            if native is None:
                write_code(model, new)
            is_native = native is not None
            write_card(new, Path(run), model, config, manifest, native=is_native, license=license)
            names = sorted(file.name for file in new.iterdir())
            about = {"run": Path(run).absolute().name, "mechanism": config.model.name, "parameters": parameters}
            about |= {"step": manifest.step, "files": names, "card": digest(new / CARD)}
            (new / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    except Exception as error:  # the libraries of tokenizers and tensors have errors of their own
        reason = (error.strerror or error) if isinstance(error, OSError) else system_limit(error)
        if reason is None:
            raise
        raise UserError(f"to={folder}: cannot be written ({reason})") from None
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return Export(folder, files, parameters, native or DepthLMConfig.model_type, native is not None)


def causal_lm_config(model: Decoder, config: Config) -> DepthLMConfig:
    """Return the transformers configuration of a decoder."""
    connection, attention = (
        {key: value for key, value in settings.items() if not key.startswith("_")}
        for settings in (config.model.connection, config.model.attention)
    )
    return DepthLMConfig(
        size=dataclasses.asdict(model.size),
        backbone=dataclasses.asdict(model.backbone),
        loops=model.loops,
        mechanism=config.model.name,
        connection=connection,
        attention=attention,
        end_of_text=model.end_of_text,
        end_of_text_begins=model.end_of_text_begins,
        max_position_embeddings=config.training.sequence_length,
    )


def write_config(
    model: Decoder, config: Config, tokenizer: PreTrainedTokenizerFast, native: str | None, folder: Path
) -> None:
    """Write config.json and generation_config.json."""
    if native is None:
        # where transformers finds the classes
        auto_map = {
            "AutoConfig": f"{flat_name(DepthLMConfig.__module__)}.{DepthLMConfig.__name__}",
            "AutoModelForCausalLM": f"{MODELING}.DepthLMForCausalLM",
        }
        settings = causal_lm_config(model, config).to_diff_dict()
        settings |= {"architectures": ["DepthLMForCausalLM"], "auto_map": auto_map}
    else:
        settings = native_config(native, model.size, model.backbone, config.training.sequence_length)
    end = tokenizer.eos_token_id
    # no padding token: transformers gives its embedding no gradient, and it may be the end of text
    settings |= {"eos_token_id": end, "pad_token_id": None, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    GenerationConfig(
        # a text without a prompt follows the end of another one
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=unused_ids(model, tokenizer),
    ).save_pretrained(folder)


def unused_ids(model: Decoder, tokenizer: PreTrainedTokenizerFast) -> list[int] | None:
    """Return the ids with which the vocabulary of a model is padded, which generation must not choose."""
    return [*range(max(tokenizer.get_vocab().values()) + 1, model.size.vocab_size)] or None


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with a class name that every version of transformers knows."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(read_text(file)) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2) + "\n")


def write_weights(model: Decoder, native: str | None, folder: Path) -> None:
    """Write model.safetensors, with the parameter names of the class that loads it."""
    if native is None:
        named = {f"decoder.{name}": tensor for name, tensor in model.state_dict().items()}
    else:
        named = {export_name(native, name): tensor for name, tensor in model.state_dict().items()}
    weights = {name: tensor.detach().to(torch.float32).contiguous() for name, tensor in named.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    set_default_mode(folder / WEIGHTS)


def check_folder(folder: Path) -> None:
    """Raise UserError if a folder cannot be created, or contains files that no export wrote."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"to={folder}: {existing} is not a folder that this user may write to")
    existing_files = {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}
    if not existing_files:
        return
    about = read_json(folder / ABOUT)
    files = about.get("files")
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise UserError(
            f"to={folder}: the folder has files ({sorted(existing_files)[0]}), but no export; give a new folder"
        )
    if foreign := sorted(existing_files - {*files, ABOUT}):
        raise UserError(
            f"to={folder}: {foreign[0]} is not part of the export in this folder, and would be lost; move "
            "it, or give a new folder"
        )
    if CARD in existing_files and (not (folder / CARD).is_file() or digest(folder / CARD) != about.get("card")):
        raise UserError(
            f"to={folder}: {CARD} was edited since the export, and would be lost; move it, give a new "
            "folder, or push this one as it is: hf upload <owner>/<name> <folder>"
        )


def as_causal_lm(model: Decoder, config: Config) -> CausalLM:
    """Wrap a decoder, as returned by `depthlm.load`, for code that expects a transformers model. Shares the weights."""
    return CausalLM(causal_lm_config(model, config), model).eval()


def as_tokenizer(tokenizer: Tokenizer, max_length: int | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer for transformers, with the same ids as in training.

    Text that is spelled like a special token is encoded as text, no token is added at the beginning or the end, and
    BPE dropout is off. Rows are padded on the left, for generation, with the padding token or, if there is none, with
    the end of text.

    max_length: sequence length of training; transformers warns about longer texts.
    """
    record = json.loads(tokenizer.text)
    for token in record.get("added_tokens") or []:
        # transformers would leave it as it is, and encode text as it
        token["special"] = token["special"] or token["content"] == tokenizer.end.token
    encoder = Encoder.from_str(json.dumps(record))
    if tokenizer.dropout:
        encoder.model.dropout = None
    if encoder.num_special_tokens_to_add(is_pair=False):
        encoder.post_processor = None
    end = tokenizer.end.token
    return PreTrainedTokenizerFast(
        tokenizer_object=encoder,
        eos_token=end,
        pad_token=end if encoder.token_to_id(PADDING) is None else PADDING,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
    )


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
    tree, lines, needed = ast.parse(text), re.split(r"(?<=\n)", text), []
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
