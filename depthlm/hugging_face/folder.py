"""A run as a folder of Hugging Face.

config.json, generation_config.json       what transformers reads first
model.safetensors                         the weights, in fp32
tokenizer.json, tokenizer_config.json     the run's tokenizer
*.py                                      the code of a decoder that transformers does not know
depthlm.json                              what it was made from, and its files
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast

from depthlm.config import Config
from depthlm.data import Tokenizer
from depthlm.errors import UserError
from depthlm.files import usual_mode
from depthlm.hugging_face.configuration import DepthLMConfig
from depthlm.hugging_face.native import native_config, native_type, their_name
from depthlm.hugging_face.source import auto_map, write_code
from depthlm.hugging_face.tokenizer import as_tokenizer
from depthlm.loading import load
from depthlm.model import Decoder

WEIGHTS, ABOUT = "model.safetensors", "depthlm.json"


class Export(NamedTuple):
    """What was written: the folder, its files with their bytes, the parameters, and the type of the model.

    native: whether transformers knows that type by itself.
    """

    folder: Path
    files: dict[str, int]
    parameters: int
    model_type: str
    native: bool


def export(run: str | Path, to: str | Path, trust: Sequence[str] = ()) -> Export:
    """Write the newest whole checkpoint of a run directory as a folder that AutoModelForCausalLM loads.

    Vanilla on a backbone of transformers becomes a Qwen3 or OLMo2 folder; for anything else the code lies in it too,
    and loading needs `trust_remote_code=True`. The folder appears at once, and replaces an earlier export whole.

    trust: modules whose mechanisms may be built and copied along, as of `depthlm.load`.
    Raises UserError for a run without a checkpoint, a folder that holds or would lose other files or cannot be written,
    and a mechanism that cannot be copied.
    """
    folder = Path(to)
    check_folder(folder)
    model, config = load(run, trust=trust)
    tokenizer = as_tokenizer(Tokenizer.load(run), config.training.sequence_length)
    native = native_type(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        with replaced(folder) as new:
            write_config(model, config, tokenizer, native, new)
            write_weights(model, native, new)
            write_tokenizer(tokenizer, new)
            if native is None:
                write_code(model, new)
            names = sorted(file.name for file in new.iterdir())
            about = {"run": Path(run).absolute().name, "mechanism": config.model.name, "parameters": parameters}
            (new / ABOUT).write_text(json.dumps(about | {"files": names}, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"to={folder}: cannot be written ({error.strerror or error})") from None
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return Export(folder, files, parameters, native or DepthLMConfig.model_type, native is not None)


def causal_lm_config(model: Decoder, config: Config) -> DepthLMConfig:
    """The configuration of a decoder for transformers."""
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
        max_position_embeddings=config.training.sequence_length,
    )


def write_config(
    model: Decoder, config: Config, tokenizer: PreTrainedTokenizerFast, native: str | None, folder: Path
) -> None:
    """config.json and generation_config.json."""
    if native is None:
        settings = causal_lm_config(model, config).to_diff_dict()
        settings |= {"architectures": ["DepthLMForCausalLM"], "auto_map": auto_map()}
    else:
        settings = native_config(native, model.size, model.backbone, config.training.sequence_length)
    end = tokenizer.eos_token_id
    # no padding here: the row of its embedding would get no gradient, and it may be the end of text
    settings |= {"eos_token_id": end, "pad_token_id": None, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, which names the class as every version of transformers does."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2) + "\n")


def write_weights(model: Decoder, native: str | None, folder: Path) -> None:
    """model.safetensors, under the names of the class that loads it."""
    weights = {
        f"decoder.{name}" if native is None else their_name(native, name): tensor.detach()
        .to(torch.float32)
        .contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    usual_mode(folder / WEIGHTS)


def check_folder(folder: Path) -> None:
    """Raises UserError where a folder cannot be made or replaced without losing what no export wrote."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"to={folder}: {existing} is no folder that this user may write to")
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}
    if not there:
        return
    try:
        written = {*json.loads((folder / ABOUT).read_text())["files"], ABOUT}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"to={folder}: it holds files, and no export ({sorted(there)[0]}); give a new folder") from None
    if foreign := sorted(there - written):
        raise UserError(f"to={folder}: {foreign[0]} is not of the export there, and would be lost; move it, or give a "
                        "new folder")  # fmt: skip


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder beside this one, which takes its place once all is written. Raises OSError."""
    folder = folder.absolute()
    held = folder.with_name(f".{folder.name}.partial")
    # of an export that was killed
    shutil.rmtree(held, ignore_errors=True)
    new = held / "new"
    new.mkdir(parents=True)
    try:
        yield new
        old = held / "old"
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(new, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
    finally:
        shutil.rmtree(held, ignore_errors=True)
