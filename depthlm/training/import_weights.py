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
from depthlm.training.checkpoints import CheckpointError, newest_checkpoint
from depthlm.training.run_directory import compare, saved_config

log = logging.getLogger("depthlm")


def import_weights(config: Config, model: Decoder, directory: Path) -> None:
    """Copy the newest whole checkpoint of the run `import_from` into the model, unless `directory` has one of its own.

    Collective: every rank takes the first rank's choice. Raises UserError where the run has no whole checkpoint, or
    one that this model cannot take; the model is then as it was.
    """
    choice: list[Path | UserError | None] = [None]
    if torch.distributed.get_rank() == 0 and not any(directory.glob("checkpoints/step-*")):
        try:
            choice = [_checkpoint(Path(config.import_from or ""))]
        except UserError as error:
            # told to the other ranks too, which would wait for a choice
            choice = [error]
    torch.distributed.broadcast_object_list(choice)
    if isinstance(choice[0], UserError):
        raise choice[0]
    if choice[0] is None:
        return
    device = str(next(model.parameters()).device)
    kept = copy_weights(load_file(choice[0] / "model.safetensors", device=device), model)
    log.info("weights imported from %s", choice[0])
    if kept:
        log.info("%d parameters that it does not have keep their start: %s", len(kept), "; ".join(_summed(kept)))
    saved, now = saved_config(Path(config.import_from or "")), dataclasses.asdict(config)
    # what gives weights their meaning beside their shapes, as the tokens' ids or the angles of RoPE
    parts = ["backbone", "size", "data"]
    there, here = (saved.get("model") or {}).get("name"), config.model.name
    if there == here:
        parts.insert(0, "model")
    else:
        log.info("these weights are of model %s, this run's is %s", there, here)
    for part in parts:
        for line in compare(saved.get(part) or {}, now[part], f"{part}."):
            log.info("these weights were trained otherwise: %s", line)


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


def _checkpoint(source: Path) -> Path:
    try:
        found = newest_checkpoint(source)
    except CheckpointError:
        found = None
    if found is None:
        raise UserError(f"import_from={source}: no whole checkpoint in it; train it first, or name another run")
    return found[0]


def _summed(texts: Iterable[str]) -> list[str]:
    """One line for what differs by numbers between dots alone, as the layers do."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", text) for text in texts)
    return [text if count == 1 else f"{text} ({count} of them)" for text, count in counts.items()]
