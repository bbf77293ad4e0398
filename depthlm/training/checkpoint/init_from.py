"""Initialization from the weights of another run or of a Hugging Face folder, to train them further or to add a
mechanism to a trained decoder. Also compares token ids."""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Encoder
from torch import Tensor

from depthlm.config import Config, ConfigError
from depthlm.config.keys import override_text
from depthlm.config.names import normal_value
from depthlm.config.saved import compare
from depthlm.config.schema import Model
from depthlm.data import Tokenizer
from depthlm.data.tokenizers import FILE_NAME
from depthlm.distributed.process_group import on_rank_0
from depthlm.errors import UserError
from depthlm.mechanisms.residual import Residual
from depthlm.model import Decoder
from depthlm.model.attention.self_attention import SelfAttention
from depthlm.model.parameters import part_of, shape_of
from depthlm.pretrained.folder import (
    Pretrained,
    differences,
    is_pretrained,
    load_weights,
    read_pretrained,
)
from depthlm.run_directory import is_checkpoint
from depthlm.runs.checkpoints import WEIGHTS, checkpoint_of
from depthlm.training.engine import writable

log = logging.getLogger("depthlm")


def import_weights(config: Config, model: Decoder) -> None:
    """Copy the weights of `init_from` (a run, a checkpoint or a Hugging Face folder) into the model; collective.

    Every rank reads the source that rank 0 chose. Raises UserError if the source has no valid checkpoint, if the model
    cannot take its weights, or if Hugging Face weights would compute something else in it; the model is then unchanged.
    """
    source = on_rank_0(lambda: _find_source(config))
    # these tensors are views of the files, which are read one weight at a time
    weights = load_file(source.path / WEIGHTS) if source.pretrained is None else load_weights(source.pretrained)
    kept = copy_weights(weights, model)
    log.info("weights imported from %s", source.path)
    if kept:
        log.info(
            "%d parameters not found there keep their initialization: %s", len(kept), "; ".join(_group_texts(kept))
        )
    saved, current = source.config, dataclasses.asdict(config)
    saved_model, model_name = (saved.get("model") or {}).get("name"), config.model.name
    if saved_model != model_name:
        log.info("the weights are from model %s, this run trains %s", saved_model, model_name)
    for line in changed_functions(saved.get("model") or {}, config.model, model):
        log.warning(line)
    if source.pretrained is not None:
        return
    # settings that change what weights of the same shape compute, such as the token ids or the angles of RoPE
    for part in ["model"] * (saved_model == model_name) + ["backbone", "size", "data"]:
        for key, words in compare(saved.get(part) or {}, current[part], f"{part}.").items():
            log.info("the weights were trained with another setting: %s: %s", key, words)


def changed_functions(saved: Mapping[str, Any], configured: Model, model: Decoder) -> list[str]:
    """Return a line for each part that is vanilla in the source and another in a decoder, where it does not
    initially compute exactly the same, with the setting with which it does, if there is one.

    saved: the model of the source, or a part of it; a part that it lacks is vanilla's.
    """
    layers = [layer.attention for layer in model.layers if isinstance(layer.attention, SelfAttention)]
    parts = {"connection": (Residual, model.connections[0]), "attention": (SelfAttention, next(iter(layers), None))}
    lines = []
    for part, (vanilla, ours) in parts.items():
        target = (saved.get(part) or {}).get("_target_", f".{vanilla.__name__}")
        setting = None if ours is None else ours.identity_start
        name, _, value = (setting or "").partition("=")
        key = f"model.{part}.{name}"
        if name and normal_value(key, override_text(getattr(configured, part).get(name))) == normal_value(key, value):
            # the decoder has this setting
            setting = ""
        if ours is None or type(ours) is vanilla or target.rpartition(".")[2] != vanilla.__name__ or setting == "":
            continue
        advice = f"; with model.{part}.{setting} it does" if setting else ""
        mechanism = getattr(configured, part)["_target_"].rpartition(".")[2]
        lines.append(f"with {mechanism}, the decoder does not initially compute exactly what these weights did{advice}")
    return lines


class Source(NamedTuple):
    """The path of the weights, the known part of their configuration, and the Hugging Face folder they are from (None:
    a checkpoint)."""

    path: Path
    config: Mapping[str, Any]
    pretrained: Pretrained | None = None


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], model: Decoder) -> list[str]:
    """Copy weights into a model by name; returns the names of the parameters that the source does not have.

    If the model has one norm per attention input and the source a single norm, all three get the weights of that one.
    Raises UserError if the model lacks a weight of the source, or has it in another shape; the model is then unchanged.
    """
    parameters = model.state_dict(keep_vars=True)
    pairs = {name: _name_in_source(name, source) for name in parameters}
    taken = set(pairs.values())
    mismatches = [
        f"{name} {list(source[name].shape)}: this model has no such parameter" for name in source if name not in taken
    ]
    mismatches += [
        f"{source_name} {list(source[source_name].shape)}: {list(shape_of(parameters[name]))} in this model"
        for name, source_name in pairs.items()
        if source_name in source and source[source_name].shape != shape_of(parameters[name])
    ]
    if mismatches:
        lines = "\n".join(f"  - {line}" for line in _group_texts(mismatches))
        raise UserError(f"init_from: this model cannot take these weights:\n{lines}")
    for name, source_name in pairs.items():
        if source_name in source:
            with writable(parameters[name]):
                parameters[name].copy_(part_of(parameters[name], source[source_name]))
    return [name for name, source_name in pairs.items() if source_name not in source]


def check_token_ids(config: Config, tokenizer: Tokenizer) -> None:
    """Raise UserError if a token has another id, or none, in the tokenizer of `init_from` or `fork_from`.

    The source is a run directory, one of its checkpoints or a Hugging Face folder. Without a tokenizer.json there,
    nothing is compared, which is logged. tokenizer: of this run.
    """
    for key, source in (("init_from", config.init_from), ("fork_from", config.fork_from)):
        if source is not None:
            _check_vocabulary(f"{key}={source}", Path(source), tokenizer.vocabulary())


def _find_source(config: Config) -> Source:
    path = Path(config.init_from or "")
    if not is_pretrained(path):
        checkpoint, manifest = checkpoint_of(path, "init_from")
        return Source(checkpoint, manifest.config)
    pretrained = read_pretrained(path)
    if errors := differences(pretrained, vars(config)):
        raise ConfigError(errors)
    return Source(path, pretrained.settings, pretrained)


def _name_in_source(name: str, source: Mapping[str, Tensor]) -> str:
    single_norm = re.sub(r"^(layers\.\d+\.attention_norm)\.\d+\.", r"\1.", name)
    return single_norm if name not in source and single_norm in source else name


def _group_texts(texts: Iterable[str]) -> list[str]:
    """Merge texts that differ only in numbers between dots, such as layer indices, into one line each."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", text) for text in texts)
    return [text if count == 1 else f"{text} ({count} of them)" for text, count in counts.items()]


def _check_vocabulary(setting: str, source: Path, vocabulary: dict[str, int]) -> None:
    # a checkpoint is at <run directory>/checkpoints/<step>
    file = (source.absolute().parent.parent if is_checkpoint(source) else source) / FILE_NAME
    if not file.is_file():
        log.warning("%s: no %s there, so its token ids are not compared with the run's", setting, FILE_NAME)
        return
    try:
        source_ids = Encoder.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"{setting}: {FILE_NAME} is not a valid tokenizer ({error})") from None
    token = next((token for token, number in vocabulary.items() if source_ids.get(token) != number), None)
    if token is not None:
        raise UserError(
            f"{setting}: its tokenizer differs from the run's: {token!r} has id {source_ids.get(token, 'none')} in "
            f"the folder and {vocabulary[token]} in the run; give data.tokenizer={file}"
        )
