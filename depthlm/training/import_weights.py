"""The weights of another run as the start of this one: to go on with them, or to give a trained decoder a mechanism."""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from depthlm.config import Config
from depthlm.errors import UserError
from depthlm.model import Decoder
from depthlm.training.agreement import on_first_rank
from depthlm.training.checkpoints import WEIGHTS, checkpoint_of
from depthlm.training.run_directory import compare

log = logging.getLogger("depthlm")


def import_weights(config: Config, model: Decoder) -> None:
    """Copy the weights of the checkpoint `import_from` into the model; collective.

    Every rank takes the first rank's choice. Raises UserError where the source has no whole checkpoint, or one that
    this model cannot take; the model is then as it was.
    """
    path, manifest = on_first_rank(lambda: checkpoint_of(Path(config.import_from or ""), "import_from"))
    device = str(next(model.parameters()).device)
    kept = copy_weights(load_file(path / WEIGHTS, device=device), model)
    log.info("weights imported from %s", path)
    if kept:
        log.info("%d parameters that it does not have keep their start: %s", len(kept), "; ".join(_summed(kept)))
    saved, now = manifest["config"], dataclasses.asdict(config)
    # what gives weights their meaning beside their shapes, as the tokens' ids or the angles of RoPE
    parts = ["backbone", "size", "data"]
    there, here = (saved.get("model") or {}).get("name"), config.model.name
    if there == here:
        parts.insert(0, "model")
    else:
        log.info("these weights are of model %s, this run's is %s", there, here)
    for part in parts:
        for key, words in compare(saved.get(part) or {}, now[part], f"{part}.").items():
            log.info("these weights were trained otherwise: %s: %s", key, words)


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
        raise UserError(f"import_from: this model cannot take these weights of that run:\n{lines}")
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
