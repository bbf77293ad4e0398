"""The weights of another run, or of a folder of Hugging Face, as the start of this one: to go on with them, or to give
a trained decoder a mechanism."""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from depthlm.config import Config, ConfigError
from depthlm.config.saved import compare
from depthlm.distributed.collectives import on_rank_0
from depthlm.errors import UserError
from depthlm.hugging_face.pretrained import (
    Pretrained,
    check_tokens,
    differences,
    is_pretrained,
    load_weights,
    read_pretrained,
)
from depthlm.model import Decoder
from depthlm.runs.checkpoints import WEIGHTS, checkpoint_of

log = logging.getLogger("depthlm")


def import_weights(config: Config, model: Decoder) -> None:
    """Copy the weights of the run, checkpoint or folder of Hugging Face `import_from` into the model; collective.

    Every rank takes the first rank's choice. Raises UserError where the source has no whole checkpoint, one that this
    model cannot take, or weights of Hugging Face that would compute something else in it; the model is then as it was.
    """
    source = on_rank_0(lambda: _find(config))
    device = str(next(model.parameters()).device)
    weights = (
        load_file(source.path / WEIGHTS, device=device)
        if source.pretrained is None
        else load_weights(source.pretrained, device)
    )
    kept = copy_weights(weights, model)
    log.info("weights imported from %s", source.path)
    if kept:
        log.info("%d parameters that it does not have keep their start: %s", len(kept), "; ".join(_summed(kept)))
    saved, now = source.config, dataclasses.asdict(config)
    there, here = (saved.get("model") or {}).get("name"), config.model.name
    if there != here:
        log.info("these weights are of model %s, this run's is %s", there, here)
    if source.pretrained is not None:
        return
    # what gives weights their meaning beside their shapes, as the tokens' ids or the angles of RoPE
    for part in ["model"] * (there == here) + ["backbone", "size", "data"]:
        for key, words in compare(saved.get(part) or {}, now[part], f"{part}.").items():
            log.info("these weights were trained otherwise: %s: %s", key, words)


class Source(NamedTuple):
    """Where weights are, the configuration they were trained with as far as it is known, and the folder of Hugging
    Face; None: it is a checkpoint."""

    path: Path
    config: Mapping[str, Any]
    pretrained: Pretrained | None = None


def _find(config: Config) -> Source:
    path = Path(config.import_from or "")
    if not is_pretrained(path):
        checkpoint, manifest = checkpoint_of(path, "import_from")
        return Source(checkpoint, manifest["config"])
    pretrained = read_pretrained(path)
    if wrong := differences(pretrained, config):
        raise ConfigError(wrong)
    check_tokens(pretrained, Path(config.output_dir or ""))
    return Source(path, pretrained.settings, pretrained)


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], model: Decoder) -> list[str]:
    """Copy weights into a model by their names; returns the names of those that the source does not have.

    Where the model has a norm for each of an attention's three inputs and the source one for all, each gets that one.
    Raises UserError, the model untouched, where the model has no place for a weight, or one of another shape.
    """
    ours = model.state_dict()
    pairs = {name: _name_in_source(name, source) for name in ours}
    taken = set(pairs.values())
    wrong = [f"{name} {list(source[name].shape)}: none of that name here" for name in source if name not in taken]
    wrong += [
        f"{theirs} {list(source[theirs].shape)}: {list(ours[name].shape)} here"
        for name, theirs in pairs.items()
        if theirs in source and source[theirs].shape != ours[name].shape
    ]
    if wrong:
        lines = "\n".join(f"  - {line}" for line in _summed(wrong))
        raise UserError(f"import_from: this model cannot take these weights:\n{lines}")
    for name, theirs in pairs.items():
        if theirs in source:
            ours[name].copy_(source[theirs])
    return [name for name, theirs in pairs.items() if theirs not in source]


def _name_in_source(name: str, source: Mapping[str, Tensor]) -> str:
    one_for_all = re.sub(r"^(layers\.\d+\.attention_norm)\.\d+\.", r"\1.", name)
    return one_for_all if name not in source and one_for_all in source else name


def _summed(texts: Iterable[str]) -> list[str]:
    """One line for what differs by numbers between dots alone, as the layers do."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", text) for text in texts)
    return [text if count == 1 else f"{text} ({count} of them)" for text, count in counts.items()]
