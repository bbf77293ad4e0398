"""Export a run as a Hugging Face folder.

config.json, generation_config.json       the configuration for transformers
model.safetensors                         the weights, in fp32
tokenizer.json, tokenizer_config.json     the run's tokenizer
*.py                                      the decoder's code, if transformers does not have the model
README.md, loss.png                       the model card and its picture
depthlm.json                              the exported run, and the files of the export
"""

import dataclasses
import json
import os
from collections.abc import Sequence
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
from depthlm.hugging_face.card import CARD, write_card
from depthlm.hugging_face.causal_lm import CausalLM, DepthLMConfig
from depthlm.hugging_face.source import auto_map, write_code
from depthlm.model import Decoder
from depthlm.pretrained.native import export_name, native_config, native_type, split_experts
from depthlm.run_directory import RunDirectory

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


def export(
    run: str | Path,
    to: str | Path | None = None,
    trust: Sequence[str] = (),
    *,
    license: str | None = None,
) -> Export:
    """Write the folder of an export, as `depthlm.hugging_face.export` does."""
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
            write_card(
                new,
                Path(run),
                model,
                config,
                manifest.step,
                native=native is not None,
                license=license,
            )
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
        settings = causal_lm_config(model, config).to_diff_dict()
        settings |= {"architectures": ["DepthLMForCausalLM"], "auto_map": auto_map()}
    else:
        settings = native_config(native, model.size, model.backbone, config.training.sequence_length)
    end = tokenizer.eos_token_id
    # no padding token: transformers gives its embedding no gradient, and it may be the end of text
    settings |= {"eos_token_id": end, "pad_token_id": None, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    GenerationConfig(
        eos_token_id=end, pad_token_id=tokenizer.pad_token_id, suppress_tokens=unused_ids(model, tokenizer)
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
        split = split_experts(model.state_dict())
        named = {export_name(native, name): tensor for name, tensor in split.items()}
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


def as_tokenizer(
    tokenizer: Tokenizer | PreTrainedTokenizerFast | str | Path, max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run directory or file for transformers, with the same ids as in training.

    Text that is spelled like a special token is encoded as text, no token is added at the beginning or the end, and
    BPE dropout is off.
    Rows are padded on the left, for generation, with the padding token or, if there is none, with the end of text.

    tokenizer: a tokenizer of transformers is returned as it is. max_length: sequence length of training; transformers
    warns about longer texts. Raises DataError for a file that is no tokenizer or has no end of text.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.load(tokenizer)
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
